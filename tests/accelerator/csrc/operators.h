// Running an operator on the CPU's kernel over the device's bytes.
#pragma once
#include <ATen/core/stack.h>

#include <string>

namespace c10 {
class OperatorHandle;
struct FunctionSchema;
}  // namespace c10

namespace sim {

std::string label_of(const c10::FunctionSchema& schema);
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
