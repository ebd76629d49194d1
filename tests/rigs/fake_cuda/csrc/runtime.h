// The state of the fake CUDA runtime: devices whose memory is host memory, and streams that run as late as they may.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

constexpr int MOST_DEVICES = 8;
constexpr int QUERY_DELAY = 2;  // queries that an event answers "not ready" before its stream runs

// A point in a stream, which an event marks.
struct Moment {
  bool is_past = false;
  double ms = 0;
};

struct Stream;

// One entry of a stream: something to run, a moment that is reached, or a moment of another stream to wait for.
struct Operation {
  std::function<void()> run;
  std::shared_ptr<Moment> reaches;
  std::shared_ptr<Moment> waits_for;
  Stream* other = nullptr;  // the stream of waits_for
};

struct Stream {
  int device;
  int priority = 0;
  std::deque<Operation> operations = {};
};

struct Event {
  int device;
  bool has_time;
  std::shared_ptr<Moment> moment = nullptr;  // of the last record
  Stream* stream = nullptr;
  int num_refusals = 0;  // queries that are still answered "not ready"
};

// Pieces of memory by their first address.
class Pieces {
 public:
  void add(const void* first, size_t nbytes) { sizes_[uintptr_t(first)] = nbytes; }
  size_t remove(const void* first);  // the size; 0 where no piece begins there
  bool has(const void* address) const { return end_of(address) != 0; }
  bool touches(const void* first, size_t nbytes) const;
  uintptr_t end_of(const void* address) const;  // of the piece around the address; 0 for none
  size_t nbytes() const;

 private:
  std::map<uintptr_t, size_t> sizes_;
};

// Everything of one process; each function of the API holds the mutex.
struct Runtime {
  std::recursive_mutex mutex;
  int num_devices;
  size_t device_nbytes = size_t(4) << 30;
  std::array<Pieces, MOST_DEVICES> device_memory;
  std::array<bool, MOST_DEVICES> has_context = {};
  std::vector<Stream*> streams;  // the first MOST_DEVICES are the devices' default streams
  Pieces registered, allocated;  // page-locked memory of the host: the caller's, and the runtime's own
  std::vector<std::string> complaints;
  bool is_broken = false;
  long failing_registration = 0;  // 1: the next one; 0: none

  Runtime();
  void complain(const std::string& text);
  int device_of(const void* address) const;  // -1: not device memory
  Stream* stream_of(cudaStream_t handle);
  void submit(Stream* stream, Operation operation) { stream->operations.push_back(std::move(operation)); }
  void run(Stream* stream, const std::shared_ptr<Moment>& until = nullptr);
  void run_all();
};

Runtime& runtime();
extern thread_local int current_device;
extern thread_local cudaError_t last_error;

cudaError_t refuse(cudaError_t error, const std::string& why);  // with a complaint: no caller of ours should see it

// Answer a call that needs no context of the current device.
template <class Body>
cudaError_t answer(Body body) {
  auto& state = runtime();
  std::lock_guard<std::recursive_mutex> lock(state.mutex);
  if (state.is_broken) return cudaErrorIllegalAddress;
  cudaError_t error = body(state);
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Answer a call that makes a context on the current device where there is none.
template <class Body>
cudaError_t answer_in_context(Body body) {
  return answer([&](Runtime& state) {
    state.has_context[current_device] = true;
    return body(state);
  });
}

}  // namespace fake
