// The same bytes as tensors of the device and of the CPU, and what an operator uses of them.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "order.h"

namespace sim {

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);
at::Tensor on_cpu(const at::Tensor& ours);  // over the same bytes; does not own them
Layout bytes_of(const at::Tensor& tensor);
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// The tensors of one operator: each of ours as one of the CPU's, and back.
class Lending {
 public:
  at::Tensor lend(const at::Tensor& tensor);
  at::Tensor give_back(const at::Tensor& result);
  std::vector<Use> made() const;  // the results that are no argument's bytes

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> lent_, made_;  // (ours, the CPU's)
};

// The host waits for the thread's current stream, and is ordered after it.
void block_host(const std::string& kind);

}  // namespace sim
