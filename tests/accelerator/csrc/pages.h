// The guard of pinned host memory: pages of copies in flight can't be used, and a signal handler notes who tries.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "order.h"

namespace sim::pages {

void set_guard(bool on);
void install_handler();  // foreign faults go on to the handler that was there before
void remove_handler();

// A copy moves the bytes now: these pages are opened for it, and its own faults are no races.
class Opened {
 public:
  Opened(uintptr_t lo, uintptr_t hi);
  ~Opened();

 private:
  uintptr_t lo_, hi_;
  int slot_ = -1;
};

// A thread that is not ordered after `step` must not write (or, `write`: use) these bytes. They stay closed until all
// threads are, or one that is has used them.
// Only whole pages between `outer_lo` and `outer_hi`, the registered range, are closed.
void close(uintptr_t lo, uintptr_t hi, bool write, const Step& step, const std::string& name, uintptr_t outer_lo,
           uintptr_t outer_hi);
void release(const std::function<bool(const Step&)>& is_known_to_all, const std::function<bool(const Step&)>& is_known);
// The calling thread has the machine's drives use these bytes: checked as a use of its own, and opened for them.
void use(uintptr_t lo, uintptr_t hi, bool write);
void forget(uintptr_t lo, uintptr_t hi);  // open all pages of this range
std::vector<std::string> take_faults();

}  // namespace sim::pages
