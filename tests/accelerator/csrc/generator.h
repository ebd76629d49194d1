// The device's random numbers: a generator of the CPU's kind that only this device draws from.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator cpu_generator_of(const std::optional<at::Generator>& generator);  // none: the default one's

}  // namespace sim
