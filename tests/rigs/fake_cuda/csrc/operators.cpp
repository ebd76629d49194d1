// CUDA's operators: the CPU's kernels over device memory, each after what its stream has still to do.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/hash.h>
#include <torch/library.h>

#include <unordered_set>

#include "../../../accelerator/csrc/operators.h"

extern "C" void fake_run_stream(void*);

namespace fake {

void register_kernels();  // of kernels.cpp

namespace {

using at::Tensor;
using torch::jit::Stack;

// What makes, views, resizes or copies memory is torch's own: the rig is there for it.
const std::unordered_set<std::string> TORCHS_OWN = {
    "aten::_copy_from", "aten::_efficientzerotensor", "aten::_local_scalar_dense", "aten::_pin_memory",
    "aten::_reshape_alias", "aten::as_strided", "aten::convolution", "aten::convolution_overrideable", "aten::copy_",
    "aten::empty", "aten::empty_strided", "aten::is_pinned", "aten::is_set_to", "aten::record_stream", "aten::resize_",
    "aten::set_", "aten::unfold", "aten::view", "aten::view_as_complex", "aten::view_as_real"};

const std::unordered_set<std::string> TAKE_CPU_TENSORS = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward",
    "aten::_pad_packed_sequence"};

void run_current_stream() { fake_run_stream(c10::cuda::getCurrentCUDAStream().stream()); }

c10::Device current_device() { return {c10::kCUDA, c10::cuda::current_device()}; }

// A tensor of the CPU over the same bytes, which it does not own.
Tensor on_cpu(const Tensor& ours) {
  auto* storage = ours.storage().unsafeGetStorageImpl();
  c10::DataPtr bytes(storage->mutable_data(), c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(bytes), c10::GetAllocator(c10::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), ours.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
  impl->_set_conj(ours.is_conj());
  impl->_set_neg(ours.is_neg());
  if (ours.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// The tensors of one call: CUDA's as the CPU's, and the results back.
class Call {
 public:
  std::optional<c10::Device> device;  // of the call: named by it, or that of its first tensor with a dimension

  Tensor lend(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      has_foreign = has_foreign || (tensor.defined() && tensor.dim() > 0);
      return tensor;
    }
    has_foreign = has_foreign || (tensor.dim() > 0 && has_dimension_ && tensor.device() != *device);
    if (!device || (tensor.dim() > 0 && !has_dimension_)) device = tensor.device();
    has_dimension_ = has_dimension_ || tensor.dim() > 0;
    for (auto& [ours, cpu] : lent_)
      if (ours.is_same(tensor)) return cpu;
    lent_.emplace_back(tensor, on_cpu(tensor));
    return lent_.back().second;
  }

  Tensor give_back(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [ours, cpu] : lent_)
      if (cpu.is_same(result)) return reshaped(ours, result);
    for (auto& [ours, cpu] : made_)
      if (cpu.is_same(result)) return ours;
    for (auto& [ours, cpu] : lent_)
      if (result.storage().data() && cpu.storage().data() == result.storage().data()) return view_of(ours, result);
    auto options = at::TensorOptions().dtype(result.scalar_type()).device(device.value_or(current_device()));
    Tensor ours = at::empty_strided(result.sizes(), result.strides(), options);
    run_current_stream();
    on_cpu(ours).copy_(result);
    made_.emplace_back(ours, result);
    return ours;
  }

  bool has_lent() const { return !lent_.empty(); }
  bool has_foreign = false;  // a tensor of the CPU or of another card that is no number

 private:
  // An argument that was written, and that an out= may have resized.
  static Tensor reshaped(const Tensor& ours, const Tensor& result) {
    auto* storage = ours.storage().unsafeGetStorageImpl();
    size_t nbytes = result.storage().nbytes();
    if (result.storage().data() != storage->data()) {
      auto grown = c10::GetAllocator(c10::kCUDA)->allocate(nbytes);
      if (nbytes) memcpy(grown.get(), result.storage().data(), nbytes);
      storage->set_data_ptr_noswap(std::move(grown));
      storage->set_nbytes(nbytes);
    }
    if (ours.sizes() != result.sizes() || ours.strides() != result.strides())
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return ours;
  }

  static Tensor view_of(const Tensor& ours, const Tensor& result) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(ours.storage()),
                                                         c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return view;
  }

  std::vector<std::pair<Tensor, Tensor>> lent_, made_;  // (CUDA's, the CPU's)
  bool has_dimension_ = false;
};

template <class Map>
void map_tensors(c10::IValue& value, Map map) {
  if (value.isTensor()) {
    value = map(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    value = mapped;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(map(*tensor)) : std::nullopt);
    value = mapped;
  }
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// A generator of the CPU whose numbers follow from the seed and the offset of CUDA's, which moves on.
at::Generator cpu_generator(const c10::IValue& given, c10::Device device) {
  auto ours = given.isNone() ? at::cuda::detail::getDefaultCUDAGenerator(device.index()) : given.toGenerator();
  auto made = at::detail::createCPUGenerator();
  made.set_current_seed(c10::hash_combine(ours.current_seed(), ours.get_offset()));
  ours.set_offset(ours.get_offset() + 4);
  return made;
}

void run_boxed(const c10::OperatorHandle& op, Stack* stack) { sim::run_on_cpu(op, stack); }

// Copies within the device that convert or gather would launch a kernel; all others are copies of the runtime.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  bool is_plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() && source.is_contiguous() &&
                  self.sizes() == source.sizes() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!self.is_cuda() || !source.is_cuda() || is_plain) return at::native::copy_(self, source, non_blocking);
  c10::cuda::CUDAGuard guard(self.device());
  run_current_stream();
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", &copy); }

}  // namespace

}  // namespace fake

// The name by which kernels.cpp runs an operator.
void sim::run_on_cpu(const c10::OperatorHandle& op, fake::Stack* stack) {
  using namespace fake;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  size_t base = stack->size() - arguments.size();
  Call call;
  for (size_t i = 0; i < arguments.size(); i++)
    map_tensors((*stack)[base + i], [&](const Tensor& tensor) { return call.lend(tensor); });
  TORCH_CHECK(!call.has_lent() || !call.has_foreign || TAKE_CPU_TENSORS.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices! (", schema.name(), ")");
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[base + i];
    if (!value.isDevice()) continue;
    call.device = value.toDevice().has_index() ? value.toDevice() : current_device();
    value = c10::Device(c10::kCPU);
  }
  c10::cuda::CUDAGuard guard(call.device.value_or(current_device()));
  for (size_t i = 0; i < arguments.size(); i++)
    if (takes_generator(arguments[i])) (*stack)[base + i] = cpu_generator((*stack)[base + i], guard.current_device());
  run_current_stream();
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after each launch of a kernel: an error that was left behind is raised here
  size_t first = stack->size() - schema.returns().size();
  bool keeps_second = schema.name() == "aten::_pack_padded_sequence";  // its batch sizes stay with the CPU
  for (size_t i = first; i < stack->size(); i++)
    if (!(keeps_second && i == first + 1))
      map_tensors((*stack)[i], [&](const Tensor& tensor) { return call.give_back(tensor); });
}

// Replace every kernel of CUDA's that does not stay torch's own; return how many. Called once a process.
extern "C" int fake_replace_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;  // for as long as the process lives
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0 || fake::TORCHS_OWN.count(name.name)) continue;
    if (dispatcher.findSchema(name))
      kept->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                              c10::KernelFunction::makeFromBoxedFunction<&fake::run_boxed>(),
                                              std::nullopt, nullptr, "the CPU's kernel, for CUDA"));
  }
  fake::register_kernels();  // the last one counts
  return int(kept->size());
}
