// Copies between host and device, and the operators that make, resize and view tensors of the device.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ledger.h"
#include "memory.h"
#include "pages.h"
#include "tensors.h"

namespace sim {

namespace {

// One copy, as the device's driver would get it.
struct Copy {
  const at::Tensor& source;
  const at::Tensor& target;
  bool to_device = target.is_privateuseone(), from_device = source.is_privateuseone();
  bool with_host = !(to_device && from_device);
  const at::Tensor& host = to_device ? source : target;  // meaningless within the device
  Range registration = {};

  // Other copies go through a temporary, that is pageable: PyTorch converts and gathers on the CPU.
  bool is_direct() const {
    return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() && host.is_contiguous();
  }
  bool is_pinned() const { return registration.hi > registration.lo; }
  int64_t nbytes() const { return int64_t(target.numel() * source.itemsize()); }

  std::string name() const {
    if (!with_host) return "copy (device to device)";
    if (is_pinned()) return to_device ? "copy (host to device)" : "copy (device to host)";
    return to_device ? "copy (pageable host to device)" : "copy (device to pageable host)";
  }
  Direction direction() const {
    if (!with_host) return DEVICE_TO_DEVICE;
    if (to_device) return is_pinned() ? HOST_TO_DEVICE : PAGEABLE_TO_DEVICE;
    return is_pinned() ? DEVICE_TO_HOST : DEVICE_TO_PAGEABLE;
  }
  void move() const {
    at::Tensor from = from_device ? on_cpu(source) : source, to = to_device ? on_cpu(target) : target;
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    to.copy_(from);
  }
};

// Two devices copy on the source's current stream, between the work before and after on the target's.
class Barrier {
 public:
  explicit Barrier(c10::Device target) : here_(current_stream()), there_(current_stream(target.index())) {
    wait(here_, there_);
  }
  ~Barrier() { wait(there_, here_); }

 private:
  static void wait(int64_t stream, int64_t other) {
    if (stream == other) return;
    Event event;
    record_event(event, other);
    stream_waits(stream, event);
  }
  int64_t here_, there_;
};

void copy_pinned(const Copy& copy, bool blocks) {
  std::string name = copy.name();
  Layout host = bytes_of(copy.host);
  Step step = submit(current_stream(), name, {{bytes_of(copy.source), false}, {bytes_of(copy.target), true}});
  log(step.stream, "copy", name, copy.nbytes(), host.lo);
  {
    pages::Opened opened(host.lo, host.hi);
    copy.move();
  }
  if (blocks) {
    block_host("blocking copy");
  } else {
    pages::close(host.lo, host.hi, !copy.to_device, step, name, copy.registration.lo, copy.registration.hi);
  }
}

// The host itself moves the bytes: to a staging buffer once the stream is idle, or from one once the copy has ended.
void copy_pageable(const Copy& copy, bool non_blocking) {
  std::string name = copy.name();
  Use device{bytes_of(copy.to_device ? copy.target : copy.source), copy.to_device};
  if (copy.to_device) {
    block_host("blocking copy");
    host_uses(bytes_of(copy.host), false, name);
  }
  Step step = submit(current_stream(), name, {device});
  log(step.stream, "copy", name, copy.nbytes(), bytes_of(copy.host).lo);
  if (!copy.to_device) {
    block_host("blocking copy");
    host_uses(bytes_of(copy.host), true, name);
  }
  copy.move();
  if (copy.to_device && !non_blocking) host_after_stream(step.stream);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  Copy copy{source, target};
  if (copy.with_host && copy.is_direct()) {
    auto host = bytes_of(copy.host);
    copy.registration = registration_of(host.lo, host.hi);
  }
  TORCH_CHECK(!copy.with_host || !copy_fails(), "sim: the copy was planned to fail");
  count_copy(copy.direction(), copy.nbytes());
  c10::DeviceGuard on(copy.from_device ? source.device() : target.device());
  note_call(current_device(), "copy");
  if (!copy.with_host) {
    Barrier barrier(target.device());
    Step step = submit(current_stream(), copy.name(), {{bytes_of(source), false}, {bytes_of(target), true}});
    log(step.stream, "copy", copy.name(), copy.nbytes(), bytes_of(target).lo);
    copy.move();
  } else if (copy.is_pinned()) {
    copy_pinned(copy, !non_blocking);
  } else {
    copy_pageable(copy, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  c10::DeviceGuard on(tensor.device());
  note_call(current_device(), "item");
  submit(current_stream(), "item", {{bytes_of(tensor), false}});
  block_host("item");
  return on_cpu(tensor).item();
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return empty_on_device(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(dtype));
}

void grow(c10::TensorImpl* impl, size_t nbytes) {
  if (nbytes > impl->storage().nbytes()) resize_storage(impl->storage().unsafeGetStorageImpl(), nbytes);
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() != sizes) {
    grow(impl, at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset()));
    impl->set_sizes_contiguous(sizes);
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor& set_storage_at(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                           c10::SymIntArrayRef symbolic_strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(symbolic_strides).vec();
  if (strides.empty() && !size.empty()) {
    strides.assign(size.size(), 1);
    for (size_t i = size.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
  }
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, strides, offset.expect_int());
  grow(impl, at::detail::computeStorageNbytes(size, strides, tensor.itemsize(), tensor.storage_offset()));
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t numel = int64_t(storage.nbytes() / tensor.itemsize());
  return set_storage_at(tensor, std::move(storage), 0, {c10::SymInt(numel)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_at(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  c10::DeviceGuard on(tensor.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage_at(tensor, nothing, 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// Copies resolve lazy conjugation and negation themselves; PyTorch's fallback would make a copy to do it, endlessly.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace sim
