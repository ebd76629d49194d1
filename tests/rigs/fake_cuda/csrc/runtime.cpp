// The state, the devices, the errors, and what the rig's Python asks for.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

Runtime& runtime() {
  static auto* state = new Runtime;  // never destroyed: torch's destructors call until the process ends
  return *state;
}

Runtime::Runtime() {
  const char* given = getenv("FAKE_CUDA_DEVICES");
  num_devices = given ? atoi(given) : 2;
  for (int device = 0; device < MOST_DEVICES; device++) streams.push_back(new Stream{device});
}

void Runtime::complain(const std::string& text) {
  if (complaints.size() < 200) complaints.push_back(text);
}

int Runtime::device_of(const void* address) const {
  for (int device = 0; device < num_devices; device++)
    if (device_memory[device].has(address)) return device;
  return -1;
}

cudaError_t refuse(cudaError_t error, const std::string& why) {
  runtime().complain("error " + std::to_string(error) + ": " + why);
  return error;
}

size_t Pieces::remove(const void* first) {
  auto found = sizes_.find(uintptr_t(first));
  if (found == sizes_.end()) return 0;
  size_t nbytes = found->second;
  sizes_.erase(found);
  return nbytes;
}

uintptr_t Pieces::end_of(const void* address) const {
  auto after = sizes_.upper_bound(uintptr_t(address));
  if (after == sizes_.begin()) return 0;
  auto [first, nbytes] = *--after;
  return uintptr_t(address) < first + nbytes ? first + nbytes : 0;
}

bool Pieces::touches(const void* first, size_t nbytes) const {
  auto after = sizes_.upper_bound(uintptr_t(first));
  return has(first) || (after != sizes_.end() && after->first < uintptr_t(first) + nbytes);
}

size_t Pieces::nbytes() const {
  size_t sum = 0;
  for (auto [first, nbytes] : sizes_) sum += nbytes;
  return sum;
}

}  // namespace fake

using namespace fake;

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = runtime().num_devices;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  return answer([=](Runtime& state) {
    if (device < 0 || device >= state.num_devices) return refuse(cudaErrorInvalidDevice, "no such device");
    current_device = device;
    state.has_context[device] = true;  // since CUDA 12
    return cudaSuccess;
  });
}

API cudaError_t cudaDeviceSynchronize() {
  return answer_in_context([](Runtime& state) {
    state.run_all();
    return cudaSuccess;
  });
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  memset(of, 0, sizeof *of);
  strcpy(of->name, "a device of host memory");
  of->major = 9;
  of->totalGlobalMem = runtime().device_nbytes;
  of->multiProcessorCount = 132;
  of->warpSize = 32;
  of->maxThreadsPerBlock = 1024;
  of->maxThreadsPerMultiProcessor = 2048;
  of->sharedMemPerBlock = 48 << 10;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->l2CacheSize = 50 << 20;
  of->textureAlignment = 512;
  of->unifiedAddressing = of->canMapHostMemory = of->hostRegisterSupported = 1;
  of->pciBusID = device + 1;
  of->uuid.bytes[0] = char(device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {{cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMultiProcessorCount, 132},
                                            {cudaDevAttrWarpSize, 32}, {cudaDevAttrComputeCapabilityMajor, 9}};
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaPeekAtLastError() { return runtime().is_broken ? cudaErrorIllegalAddress : last_error; }

API cudaError_t cudaGetLastError() {
  auto error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

API const char* cudaGetErrorName(cudaError_t error) { return error ? "a cudaError of the fake runtime" : "cudaSuccess"; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    default: return "an error of the fake runtime";
  }
}

// What device.py calls.

API const char* fake_complaints() {
  auto& state = runtime();
  std::lock_guard<std::recursive_mutex> lock(state.mutex);
  static std::string text;
  text.clear();
  for (auto& complaint : state.complaints) text += complaint + "\n";
  state.complaints.clear();
  return text.c_str();
}

API int fake_has_context(int device) { return runtime().has_context[device]; }
API long fake_registered_nbytes() { return long(runtime().registered.nbytes()); }
API void fake_set_broken(int is_broken) { runtime().is_broken = is_broken; }
API void fake_set_device_nbytes(long nbytes) { runtime().device_nbytes = size_t(nbytes); }
API void fake_fail_registration(long after) { runtime().failing_registration = after + 1; }

// A function of the runtime or of a library that the rig does not have; the build generates its callers.
API int fake_missing(const char* name) {
  auto& state = runtime();
  std::lock_guard<std::recursive_mutex> lock(state.mutex);
  state.complain(std::string(name) + " was called, which the fake runtime does not have");
  return cudaErrorNotSupported;
}
