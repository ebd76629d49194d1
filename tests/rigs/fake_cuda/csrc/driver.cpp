// The functions of the driver that torch looks up by name. libcuda.so.1 is a link to this library.
#include <cstring>

#include "runtime.h"

using namespace fake;

API int fake_missing(const char* name);

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = runtime().has_context[device];
  return 0;
}

API int cuGetErrorString(int, const char** text) {
  *text = "an error of the fake driver";
  return 0;
}

API int cuCtxGetCurrent(void** context) {
  *context = &runtime();
  return 0;
}

static int not_there() { return fake_missing("a function of the driver"); }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = (void*)&not_there;
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = (void*)&cuDevicePrimaryCtxGetState;
  if (!strcmp(name, "cuGetErrorString")) *function = (void*)&cuGetErrorString;
  if (!strcmp(name, "cuCtxGetCurrent")) *function = (void*)&cuCtxGetCurrent;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
