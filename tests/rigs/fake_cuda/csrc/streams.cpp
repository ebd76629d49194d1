// Streams and events: an entry of a stream runs when somebody waits for it, and not before.
#include "runtime.h"

namespace fake {

Stream* Runtime::stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return streams[current_device];
  return reinterpret_cast<Stream*>(handle);
}

void Runtime::run(Stream* stream, const std::shared_ptr<Moment>& until) {
  while (!stream->operations.empty() && !(until && until->is_past)) {
    Operation next = std::move(stream->operations.front());
    stream->operations.pop_front();
    if (next.waits_for && !next.waits_for->is_past) run(next.other, next.waits_for);
    if (next.run) next.run();
    if (next.reaches) {
      auto now = std::chrono::steady_clock::now().time_since_epoch();
      *next.reaches = {true, std::chrono::duration<double, std::milli>(now).count()};
    }
  }
}

void Runtime::run_all() {
  for (auto* stream : streams) run(stream);
}

}  // namespace fake

using namespace fake;

static Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int priority) {
  return answer_in_context([=](Runtime& state) {
    state.streams.push_back(new Stream{current_device, priority});
    *made = reinterpret_cast<cudaStream_t>(state.streams.back());
    return cudaSuccess;
  });
}

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return answer([=](Runtime& state) {
    *priority = state.stream_of(handle)->priority;
    return cudaSuccess;
  });
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) { return cudaStreamSynchronize(handle); }

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return answer([=](Runtime& state) {
    state.run(state.stream_of(handle));
    return cudaSuccess;
  });
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned) {
  return answer([=](Runtime& state) {
    auto* event = event_of(awaited);
    if (event->moment && !event->moment->is_past)
      state.submit(state.stream_of(handle), {nullptr, nullptr, event->moment, event->stream});
    return cudaSuccess;
  });
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  return answer_in_context([=](Runtime&) {
    *made = reinterpret_cast<cudaEvent_t>(new Event{current_device, !(flags & cudaEventDisableTiming)});
    return cudaSuccess;
  });
}

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return answer([=](Runtime&) {
    delete event_of(handle);
    return cudaSuccess;
  });
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t recorded_on, unsigned) {
  return answer([=](Runtime& state) {
    auto* event = event_of(handle);
    auto* stream = state.stream_of(recorded_on);
    if (event->device != stream->device)
      return refuse(cudaErrorInvalidResourceHandle, "an event recorded on a stream of another device");
    event->moment = std::make_shared<Moment>();
    event->stream = stream;
    event->num_refusals = QUERY_DELAY;
    state.submit(stream, {nullptr, event->moment});
    return cudaSuccess;
  });
}

API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return answer([=](Runtime& state) {
    auto* event = event_of(handle);
    if (!event->moment || event->moment->is_past) return cudaSuccess;
    if (event->num_refusals-- > 0) return cudaErrorNotReady;
    state.run(event->stream, event->moment);
    return cudaSuccess;
  });
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return answer([=](Runtime& state) {
    auto* event = event_of(handle);
    if (event->moment) state.run(event->stream, event->moment);
    return cudaSuccess;
  });
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return answer([=](Runtime&) {
    auto *first = event_of(from), *second = event_of(to);
    if (!first->has_time || !second->has_time || !first->moment || !second->moment)
      return refuse(cudaErrorInvalidResourceHandle, "the time between events that were made without one, or not recorded");
    if (!first->moment->is_past || !second->moment->is_past) return cudaErrorNotReady;
    *ms = float(second->moment->ms - first->moment->ms);
    return cudaSuccess;
  });
}

// Called before an operator computes: what its stream has still to do is done.
API void fake_run_stream(void* handle) {
  auto& state = runtime();
  std::lock_guard<std::recursive_mutex> lock(state.mutex);
  state.run(state.stream_of(reinterpret_cast<cudaStream_t>(handle)));
}
