// The operators that the CPU has under another name, or not at all: those of the simulated device, for CUDA.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL  // or they would be registered for the simulated device, and before all others
#define TORCH_LIBRARY_IMPL(library, key, m) void register_all(torch::Library& m)
#include "../../../accelerator/csrc/kernels.cpp"

namespace fake {

void register_kernels() {
  static auto* cuda = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  sim::register_all(*cuda);
}

}  // namespace fake
