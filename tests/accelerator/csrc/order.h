// Happens-before: vector clocks of the streams and of the host's threads, the accesses to bytes, and the races between.
//
// Every function takes the one mutex for a short while, and calls nothing of Python or PyTorch while it holds it.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "layout.h"

namespace sim {

// The host: what some thread of it knows. A thread that has joined is a party of its own, with a number below this one,
// and knows what it has waited or asked for, and what was handed over to it; the others know what some thread knows.
constexpr int64_t HOST = -1;
constexpr int64_t MAIN = -2;  // the main thread and autograd's, which works while the main one waits

using Clock = std::map<int64_t, uint64_t>;  // party: the last of its steps that is ordered before

struct Use {
  Layout bytes;
  bool write;
};

struct Event {
  Clock clock;
  int64_t stream = 0;
  bool recorded = false;
  uint64_t hung = 0;    // the hang epoch in which it was recorded, 0: it completes
  int64_t queries = 0;  // how many more queries answer False
  double time_ms = 0;
};

// Where a submitted piece of work stands: the step of its stream.
struct Step {
  int64_t stream;
  uint64_t number;
};

// Work submitted to a stream: what the host did before is ordered before it.
Step submit(int64_t stream, const std::string& name, const std::vector<Use>& uses);
// More uses of a step: the results that it made.
void also_uses(const Step& step, const std::string& name, const std::vector<Use>& uses);
// The host uses these bytes now.
void host_uses(const Layout& bytes, bool write, const std::string& name);
// The host waits for all that the stream has been given (or, before a step is submitted, for what came before it).
void host_after_stream(int64_t stream);
void host_after_device();

// Threads.
void join_as_main();  // the calling thread, for good
void join();          // the calling thread, until it ends: knows at first what was handed over at `place`, see below
// What the calling thread knows is handed over at a place, by a lock or by bytes (at each page from a page's start on),
// and taken over there by others.
void hand_over(uintptr_t place, uint64_t nbytes);
void take_over(uintptr_t place, uint64_t nbytes);
// For the guard, in a signal handler: whether the calling thread is ordered after `step`; `known`: some thread is.
bool thread_knows(const Step& step, bool known);

void record_event(Event& event, int64_t stream);
void stream_waits(int64_t stream, Event& event);
bool query_event(Event& event);
void host_waits_event(Event& event);
bool query_stream(int64_t stream);
void check_not_hung(int64_t stream);
void check_device_not_hung();

// Device memory, or host memory that is registered: its accesses are kept together and forgotten with it.
void add_block(uintptr_t address, uint64_t nbytes, int64_t stream);
void remove_block(uintptr_t address, const std::string& how);
void forget_block(uintptr_t address);  // without a check
void use_block_on(uintptr_t address, int64_t stream);  // record_stream

void report(std::string race);
std::vector<std::string> take_races();
void set_query_delay(int64_t n);
void set_hang_events(bool hang);
void reset_order();

std::string name_of_party(int64_t party);
std::string name_of_bytes(const Layout& bytes);

}  // namespace sim
