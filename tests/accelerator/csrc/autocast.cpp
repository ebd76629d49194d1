// Autocast of the device, by PyTorch's own lists of operators.
//
// Boxed: the casts are made on the operator's stack, so that a hundred operators need no code each.
#include <ATen/autocast_mode.h>

namespace {

using Stack = torch::jit::Stack;
constexpr auto SIM = c10::DeviceType::PrivateUse1;

void cast(c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    value = at::autocast::cached_cast(dtype, value.toTensor(), SIM);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(at::autocast::cached_cast(dtype, tensor, SIM));
    value = list;
  }
}

size_t start_of(const c10::OperatorHandle& op, const Stack* stack) { return stack->size() - op.schema().arguments().size(); }

void run(const c10::OperatorHandle& op, Stack* stack, std::optional<at::ScalarType> dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (dtype.has_value())
    for (size_t i = start_of(op, stack); i < stack->size(); i++) cast((*stack)[i], *dtype);
  op.callBoxed(stack);
}

void lower_precision_fp(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, at::autocast::get_autocast_dtype(SIM));
}

void fp32(const c10::OperatorHandle& op, Stack* stack) { run(op, stack, at::kFloat); }

// The result's dtype is an argument: float32, where the caller leaves it open.
void fp32_set_opt_dtype(const c10::OperatorHandle& op, Stack* stack) {
  size_t start = start_of(op, stack);
  const auto& first = (*stack)[start];
  const auto& arguments = op.schema().arguments();
  if (first.isTensor() && at::autocast::is_autocast_eligible(first.toTensor(), SIM))
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].name() == "dtype" && (*stack)[start + i].isNone()) (*stack)[start + i] = at::kFloat;
  run(op, stack, std::nullopt);
}

void promote(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(SIM);
  for (size_t i = start_of(op, stack); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) widest = at::autocast::prioritize(widest, value.toTensor(), SIM);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) widest = at::autocast::prioritize(widest, tensor, SIM);
  }
  run(op, stack, widest);
}

template <void (*policy)(const c10::OperatorHandle&, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<policy>();
}

#define NAME_1(OP) "aten::" #OP
#define NAME_2(OP, OVERLOAD) "aten::" #OP "." #OVERLOAD
#define PICK(_1, _2, NAME, ...) NAME
#define NAME(...) PICK(__VA_ARGS__, NAME_2, NAME_1)(__VA_ARGS__)
#define LOWER(...) m.impl(NAME(__VA_ARGS__), boxed<&lower_precision_fp>());
#define FLOAT(...) m.impl(NAME(__VA_ARGS__), boxed<&fp32>());
#define OPEN(...) m.impl(NAME(__VA_ARGS__), boxed<&fp32_set_opt_dtype>());
#define WIDEST(...) m.impl(NAME(__VA_ARGS__), boxed<&promote>());

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPEN)
  AT_FORALL_PROMOTE(WIDEST)
  FLOAT(norm, Scalar)  // PyTorch appends a dtype instead: the same results
  FLOAT(norm, ScalarOpt_dim)
  m.impl("cat", boxed<&promote>());
  m.impl("stack", boxed<&promote>());
}

}  // namespace
