// Every operator of the device: the CPU's own kernel over the same bytes, after its uses were put in order.
#include "operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

#include "generator.h"
#include "ledger.h"
#include "memory.h"
#include "tensors.h"

namespace sim {

namespace {

using Stack = torch::jit::Stack;

// Their results' sizes depend on the data: the host waits for them.
const std::unordered_set<std::string> DATA_DEPENDENT = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::repeat_interleave", "aten::_linalg_check_errors", "aten::argwhere", "aten::histc"};

// Their tensors of the CPU are meant to be there.
const std::unordered_set<std::string> TAKE_CPU_TENSORS = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward",
    "aten::_pad_packed_sequence"};

// A mask among the indices of (self, *indices, values) is looked up by the kernel; reads ask for nonzero before.
bool is_data_dependent(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (DATA_DEPENDENT.count(name)) return true;
  if (name != "aten::index_put" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  for (size_t i = 1; i + 1 < tensors.size(); i++)
    if (tensors[i].defined() && (tensors[i].scalar_type() == at::kBool || tensors[i].scalar_type() == at::kByte))
      return true;
  return false;
}

template <class F>
void each_tensor(const c10::IValue& value, F use) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) use(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor.has_value()) use(*tensor);
  }
}

template <class F>
void map_tensors(c10::IValue& value, F map) {
  if (value.isTensor()) {
    value = map(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    value = c10::IValue(c10::List<at::Tensor>(mapped));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor.has_value() ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    value = c10::IValue(mapped);
  }
}

// Batch norm's running statistics: written, though some schemas don't say so.
bool is_hidden_write(const c10::FunctionSchema& schema, const Stack& stack, size_t base, size_t i) {
  const auto& argument = schema.arguments()[i].name();
  if (argument != "running_mean" && argument != "running_var") return false;
  if (schema.name().find("batch_norm") == std::string::npos || schema.name().find("backward") != std::string::npos)
    return false;
  for (size_t k = 0; k < schema.arguments().size(); k++)
    if (schema.arguments()[k].name() == "training" || schema.arguments()[k].name() == "train")
      return stack[base + k].toBool();
  return true;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

}  // namespace

std::string label_of(const c10::FunctionSchema& schema) {
  std::string label = schema.name().rfind("aten::", 0) == 0 ? schema.name().substr(6) : schema.name();
  return schema.overload_name().empty() ? label : label + "." + schema.overload_name();
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  size_t base = stack->size() - arguments.size();
  std::string label = label_of(schema);

  std::vector<Use> uses;
  std::vector<at::Tensor> tensors;
  c10::OptionalDeviceGuard on;  // the device of its tensors, or the one that it is told
  bool has_foreign = false;
  int64_t nbytes = 0;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    bool write = (alias && alias->isWrite()) || is_hidden_write(schema, *stack, base, i);
    each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      if (!tensor.defined()) return;
      if (tensor.is_cpu()) has_foreign = has_foreign || tensor.dim() > 0;
      if (!tensor.is_privateuseone()) return;
      TORCH_CHECK(uses.empty() || tensor.device() == *on.current_device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *on.current_device(),
                  " and ", tensor.device(), "! (", label, ")");
      if (uses.empty()) on.reset_device(tensor.device());
      uses.push_back({bytes_of(tensor), write});
      nbytes += int64_t(tensor.nbytes());
    });
    const auto& value = (*stack)[base + i];
    if (uses.empty() && value.isDevice() && value.toDevice().is_privateuseone()) on.reset_device(value.toDevice());
  }
  note_call(current_device(), "operator");
  TORCH_CHECK(!has_foreign || TAKE_CPU_TENSORS.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, sim:",
              int(current_device()), " and cpu! (", label, ")");
  bool blocks = is_data_dependent(schema.name(), tensors);
  tensors.clear();
  Step step = submit(current_stream(), label, uses);
  log(step.stream, "operator", label, nbytes, uses.empty() ? 0 : uses[0].bytes.lo);

  Lending lending;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[base + i];
    map_tensors(value, [&](const at::Tensor& tensor) { return lending.lend(tensor); });
    if (value.isDevice()) value = c10::IValue(c10::Device(c10::kCPU));
    if (takes_generator(arguments[i]))
      value = cpu_generator_of(value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator()));
  }
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  size_t first = stack->size() - schema.returns().size();
  bool keeps_second = schema.name() == "aten::_pack_padded_sequence";  // its batch sizes stay with the CPU
  for (size_t i = first; i < stack->size(); i++)
    if (!(keeps_second && i == first + 1))
      map_tensors((*stack)[i], [&](const at::Tensor& tensor) { return lending.give_back(tensor); });
  also_uses(step, label, lending.made());
  if (blocks) block_host(label);
}

static void fallback(const c10::OperatorHandle& op, Stack* stack) { run_on_cpu(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sim
