// Memory of devices and of the host, and copies, which wait in their streams.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "runtime.h"

using namespace fake;

namespace {

constexpr size_t PAGE = 4096, MOST_POISONED = size_t(64) << 20;

enum class Locked { NO, WHOLE, PARTLY };

// Whether memory of the host is page-locked. CUDA refuses a copy that lies in two registrations, or partly in one.
Locked locked(const Runtime& state, const void* first, size_t nbytes) {
  for (auto* pieces : {&state.registered, &state.allocated})
    if (auto end = pieces->end_of(first)) return uintptr_t(first) + nbytes <= end ? Locked::WHOLE : Locked::PARTLY;
  return state.registered.touches(first, nbytes) ? Locked::PARTLY : Locked::NO;
}

cudaError_t copy(Runtime& state, void* target, const void* source, size_t nbytes, Stream* stream) {
  bool to_device = state.device_of(target) >= 0, from_device = state.device_of(source) >= 0;
  auto move = [=] { memmove(target, source, nbytes); };
  auto how = to_device && from_device ? Locked::WHOLE : locked(state, to_device ? source : target, nbytes);
  if (how == Locked::PARTLY)
    return refuse(cudaErrorInvalidValue, "a copy of " + std::to_string(nbytes) + " bytes across two registrations");
  state.submit(stream, {move});
  if (how == Locked::NO) state.run(stream);
  return cudaSuccess;
}

}  // namespace

API cudaError_t cudaMalloc(void** made, size_t nbytes) {
  return answer_in_context([=](Runtime& state) {
    auto& memory = state.device_memory[current_device];
    *made = nullptr;
    if (nbytes == 0) return cudaSuccess;  // as torch asks without a cache of memory
    if (memory.nbytes() + nbytes > state.device_nbytes) return cudaErrorMemoryAllocation;
    void* first = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (first == MAP_FAILED) return refuse(cudaErrorMemoryAllocation, "the host has no memory for the device's");
    if (nbytes <= MOST_POISONED) memset(first, 0xFF, nbytes);  // not a number, in every floating-point type
    memory.add(first, nbytes);
    *made = first;
    return cudaSuccess;
  });
}

API cudaError_t cudaFree(void* first) {
  return answer([=](Runtime& state) {
    if (!first) return cudaSuccess;
    int device = state.device_of(first);
    size_t nbytes = device < 0 ? 0 : state.device_memory[device].remove(first);
    if (!nbytes) return refuse(cudaErrorInvalidValue, "a free of what no device has");
    state.run_all();
    munmap(first, nbytes);
    return cudaSuccess;
  });
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return answer_in_context([=](Runtime& state) {
    *total = state.device_nbytes;
    *free = *total - state.device_memory[current_device].nbytes();
    return cudaSuccess;
  });
}

API cudaError_t cudaHostAlloc(void** made, size_t nbytes, unsigned) {
  return answer_in_context([=](Runtime& state) {
    *made = aligned_alloc(PAGE, (nbytes + PAGE - 1) / PAGE * PAGE);
    state.allocated.add(*made, nbytes);
    return cudaSuccess;
  });
}

API cudaError_t cudaFreeHost(void* first) {
  return answer([=](Runtime& state) {
    if (!state.allocated.remove(first)) return refuse(cudaErrorInvalidValue, "a free of host memory that is not ours");
    state.run_all();
    free(first);
    return cudaSuccess;
  });
}

API cudaError_t cudaHostRegister(void* first, size_t nbytes, unsigned flags) {
  return answer_in_context([=](Runtime& state) {
    if (state.failing_registration && !--state.failing_registration) return cudaErrorMemoryAllocation;  // as planned
    if (flags) return refuse(cudaErrorInvalidValue, "a registration with flags");
    if (locked(state, first, nbytes) != Locked::NO)
      return refuse(cudaErrorHostMemoryAlreadyRegistered, "a registration over another");
    state.registered.add(first, nbytes);
    return cudaSuccess;
  });
}

API cudaError_t cudaHostUnregister(void* first) {
  return answer_in_context([=](Runtime& state) {
    if (!state.registered.remove(first)) return refuse(cudaErrorHostMemoryNotRegistered, "no registration begins there");
    return cudaSuccess;
  });
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* address) {
  return answer([=](Runtime& state) {
    memset(of, 0, sizeof *of);
    int device = state.device_of(address);
    of->device = device;
    of->type = device >= 0 ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    if (locked(state, address, 1) == Locked::WHOLE) of->type = cudaMemoryTypeHost;
    if (device < 0) of->hostPointer = const_cast<void*>(address);
    if (of->type != cudaMemoryTypeUnregistered) of->devicePointer = const_cast<void*>(address);
    return cudaSuccess;
  });
}

API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t handle) {
  return answer([=](Runtime& state) { return copy(state, target, source, nbytes, state.stream_of(handle)); });
}

API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t handle) {
  return cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDefault, handle);
}

API cudaError_t cudaMemsetAsync(void* first, int value, size_t nbytes, cudaStream_t handle) {
  return answer([=](Runtime& state) {
    state.submit(state.stream_of(handle), {[=] { memset(first, value, nbytes); }});
    return cudaSuccess;
  });
}
