// Lending tensors of the device to the CPU's kernels: nothing is copied in, results are copied once.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

#include "ledger.h"
#include "memory.h"

namespace sim {

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor on_cpu(const at::Tensor& ours) {
  const auto& storage = ours.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      ours.dtype());
  auto* impl = cpu.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
  if (ours.is_conj()) impl->_set_conj(true);
  if (ours.is_neg()) impl->_set_neg(true);
  if (ours.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return cpu;
}

Layout bytes_of(const at::Tensor& t) {
  auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  if (t.numel() == 0 || !address) return {};
  if (t.is_contiguous()) return dense_layout(address, t.nbytes());
  return strided_layout(address, t.itemsize(), t.sizes().data(), t.strides().data(), t.dim());
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "sim: the storage can't be resized");
  if (storage->nbytes() == nbytes) return;
  c10::DeviceGuard on(storage->device());
  auto fresh = device_allocator()->allocate(nbytes);
  size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    submit(current_stream(), "resize_",
           {{dense_layout(reinterpret_cast<uintptr_t>(storage->data()), kept), false},
            {dense_layout(reinterpret_cast<uintptr_t>(fresh.get()), kept), true}});
    memcpy(fresh.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

at::Tensor Lending::lend(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  for (auto& [ours, cpu] : lent_)
    if (ours.is_same(tensor)) return cpu;
  lent_.emplace_back(tensor, on_cpu(tensor));
  return lent_.back().second;
}

at::Tensor Lending::give_back(const at::Tensor& result) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (auto& [ours, cpu] : lent_) {
    if (!cpu.is_same(result)) continue;
    auto* storage = ours.storage().unsafeGetStorageImpl();
    if (result.storage().data() != storage->data()) {  // an out= that grew
      resize_storage(storage, result.storage().nbytes());
      if (result.storage().nbytes()) memcpy(storage->mutable_data(), result.storage().data(), result.storage().nbytes());
    }
    if (ours.sizes() != result.sizes() || ours.strides() != result.strides())
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return ours;
  }
  for (auto& [ours, cpu] : made_)
    if (cpu.is_same(result)) return ours;
  for (auto& [ours, cpu] : lent_) {
    if (!result.storage().data() || cpu.storage().data() != result.storage().data()) continue;
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(ours.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return view;
  }
  auto ours = empty_on_device(result.sizes(), result.strides(), result.scalar_type());
  on_cpu(ours).copy_(result);
  made_.emplace_back(ours, result);
  return ours;
}

std::vector<Use> Lending::made() const {
  std::vector<Use> uses;
  for (auto& [ours, cpu] : made_) uses.push_back({bytes_of(ours), true});
  return uses;
}

void block_host(const std::string& kind) {
  count_blocking(kind);
  check_not_hung(current_stream());
  host_after_stream(current_stream());
}

}  // namespace sim
