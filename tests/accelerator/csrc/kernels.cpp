// Operators that the CPU has under another name, or not at all: convolution, recurrent cells, dropout; and the norms of
// lists, which have bits of their own.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "operators.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool has(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

const c10::OperatorHandle& operator_of(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  auto known = found.find(name);
  if (known == found.end())
    known = found.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return known->second;
}

// The same arguments as aten::convolution.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_on_cpu(operator_of("aten::convolution"), stack);
}

// aten::convolution_backward has the sizes of the bias as one more argument.
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t base = stack->size() - op.schema().arguments().size();
  const Tensor grad_output = (*stack)[base].toTensor(), weight = (*stack)[base + 2].toTensor();
  bool transposed = (*stack)[base + 6].toBool();
  int64_t groups = (*stack)[base + 8].toInt();
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->begin() + int64_t(base) + 3, c10::IValue(std::vector<int64_t>{channels}));
  run_on_cpu(operator_of("aten::convolution_backward"), stack);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (has(input_bias)) gates = gates + *input_bias;
  if (has(hidden_bias)) gates = gates + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!has(grad_hy) && !has(grad_cy)) return {};
  auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  Tensor tanh_cy = cy.tanh();
  Tensor grad_out = has(grad_hy) ? *grad_hy * tanh_cy : at::zeros_like(cy);
  Tensor grad_cell_state = has(grad_hy) ? *grad_hy * out * (1 - tanh_cy * tanh_cy) : at::zeros_like(cy);
  if (has(grad_cy)) grad_cell_state = grad_cell_state + *grad_cy;
  Tensor grad_gates = at::cat({grad_cell_state * cell * in * (1 - in), grad_cell_state * cx * forget * (1 - forget),
                               grad_cell_state * in * (1 - cell * cell), grad_out * out * (1 - out)}, 1);
  return {grad_gates, grad_cell_state * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto input = (has(input_bias) ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto hidden = (has(hidden_bias) ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  Tensor reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  Tensor fresh = (input[2] + reset * hidden[2]).tanh();
  Tensor hy = (hx - fresh) * update + fresh;
  return {hy, at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  Tensor grad_reset = grad_fresh * hidden * reset * (1 - reset);
  Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

// As on the CPU, whose kernel draws from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  double keep = 1. - p;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  return {input.mul(mask).mul_(keep == 0 ? 0. : 1. / keep), mask};
}

constexpr int64_t CHUNK = 48;  // elements

// The norm of one tensor in the order of a GPU's kernel for lists: by chunks of the memory, and then chunk after chunk.
// So the result differs from linalg_vector_norm's, as it does there. Of all operators of lists that the product calls
// this one alone has another order than the operator of a single tensor: the others are elementwise (_foreach_mul_), or
// round otherwise on the CPU already (_fused_adamw_, _amp_foreach_non_finite_check_and_unscale_ of bfloat16).
Tensor norm_by_chunks(const Tensor& tensor, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  double p = order.toDouble();
  if ((p != 1 && p != 2) || !at::isFloatingType(tensor.scalar_type()) || !tensor.is_non_overlapping_and_dense() ||
      tensor.numel() == 0)
    return at::linalg_vector_norm(tensor, order, at::OptionalIntArrayRef{}, false, dtype);
  auto result = dtype.value_or(tensor.scalar_type());
  Tensor flat = tensor.as_strided({tensor.numel()}, {1}).to(result == at::kDouble ? at::kDouble : at::kFloat);
  Tensor terms = p == 1 ? flat.abs() : flat * flat;
  int64_t padding = (CHUNK - terms.numel() % CHUNK) % CHUNK;
  Tensor chunks = at::constant_pad_nd(terms, {0, padding}).view({-1, CHUNK}).sum(1);
  Tensor sum = chunks.cumsum(0).select(0, -1);
  return (p == 1 ? sum.clone() : sum.sqrt()).to(result);
}

std::vector<Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  std::vector<Tensor> norms;
  for (const Tensor& tensor : tensors) norms.push_back(norm_by_chunks(tensor, order, dtype));
  return norms;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("native_dropout", &native_dropout);
  m.impl("_foreach_norm.Scalar", &foreach_norm);
}

}  // namespace

}  // namespace sim
