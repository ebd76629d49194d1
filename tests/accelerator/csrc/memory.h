// Device memory with a limit, and pinned host memory by range.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>

namespace sim {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

void set_memory_limit(int64_t nbytes);  // 0: the machine's memory
void set_poison(bool on);
void set_allocation_writes(bool on);

void host_register(uintptr_t address, int64_t nbytes);
void host_unregister(uintptr_t address);
bool is_registered(uintptr_t address);

struct Range {
  uintptr_t lo = 0, hi = 0;
};
// The registration that these bytes lie in, or an empty one where they meet none. Raises where they lie in one in part.
Range registration_of(uintptr_t lo, uintptr_t hi);

int64_t current_stream();
int64_t exchange_stream(int64_t stream);
void set_enabled(bool on);
bool is_enabled();

}  // namespace sim
