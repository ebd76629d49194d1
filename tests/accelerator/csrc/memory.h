// Memory of the devices with a limit each, pinned host memory by range, and each thread's current device and streams.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>

namespace sim {

using c10::DeviceIndex;

constexpr DeviceIndex NUM_DEVICES = 2;

c10::DeviceAllocator* device_allocator();  // of memory on the current device
c10::Allocator* pinned_allocator();

void set_memory_limit(int64_t nbytes, int device);  // 0: the machine's memory
void empty_cache();                                 // of all devices
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

// The calling thread's device, 0 until it is set. To set another is a call on it; to go back to one is none.
DeviceIndex index_of(c10::Device device);  // without an index: the current device's. Raises where there is none
DeviceIndex current_device();
void set_device(DeviceIndex device);
DeviceIndex go_back_to_device(DeviceIndex device) noexcept;

// The calling thread's stream on each device. The numbers of streams are unique over the devices.
constexpr int64_t default_stream(DeviceIndex device) { return device; }
int64_t current_stream();  // of the current device
int64_t current_stream(DeviceIndex device);
int64_t exchange_stream(DeviceIndex device, int64_t stream);
void set_enabled(bool on);
bool is_enabled();

}  // namespace sim
