// The devices' random numbers: generators of the CPU's kind that only one device draws from.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex device);  // -1: of the current device
at::Generator new_generator(c10::DeviceIndex device);
at::Generator cpu_generator_of(const std::optional<at::Generator>& generator);  // none: the current device's

}  // namespace sim
