// The guard of pinned host memory. The signal handler reads plain atomics, and calls nothing but mprotect.
#include "pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace sim::pages {

namespace {

constexpr uintptr_t PAGE = 4096;
constexpr int NUM_FLIGHTS = 4096, NUM_COPIERS = 64, NUM_FAULTS = 256, NUM_GUARDED = 1024;

struct Flight {  // a copy in flight
  std::atomic<bool> used{false};
  std::atomic<uintptr_t> lo{0}, hi{0}, page_lo{0}, page_hi{0};
  std::atomic<bool> write{false}, known{false};  // known: some thread is ordered after it
  Step step{};
  char name[48] = {};
};

struct Fault {
  std::atomic<bool> ready{false};
  uintptr_t address = 0;
  bool host_writes = false, copy_writes = false;
  int64_t stream = 0;
  char name[48] = {};
};

// A registration whose pages were closed once. A fault may come late: its copy has ended, its pages are open again.
struct Guarded {
  std::atomic<uintptr_t> lo{0}, hi{0};
};

std::mutex mutex;  // of everything but what the handler reads
std::atomic<bool> guarding{false};
std::atomic<int> num_flights{0};  // all in use lie below
Flight flights[NUM_FLIGHTS];
Fault faults[NUM_FAULTS];
Guarded guarded[NUM_GUARDED];
std::atomic<int> num_faults{0};
std::atomic<pid_t> copiers[NUM_COPIERS];
struct sigaction before;
bool installed = false;

pid_t thread_id() { return pid_t(syscall(SYS_gettid)); }

void protect(uintptr_t lo, uintptr_t hi, int how) {
  if (lo < hi) mprotect(reinterpret_cast<void*>(lo), hi - lo, how);
}

// Whether there is room to note these pages for the handler.
bool add_guarded(uintptr_t lo, uintptr_t hi) {
  for (auto& range : guarded)
    if (range.lo == lo && range.hi == hi) return true;
  for (auto& range : guarded)
    if (range.hi == 0) {
      range.lo = lo;
      range.hi = hi;
      return true;
    }
  return false;
}

// Close the pages in [lo, hi) again as far as copies in flight need it.
void protect_again(uintptr_t lo, uintptr_t hi) {
  for (bool write : {false, true})
    for (int i = 0; i < num_flights; i++) {
      auto& f = flights[i];
      if (!f.used || f.write != write) continue;
      uintptr_t from = std::max<uintptr_t>(lo, f.page_lo), to = std::min<uintptr_t>(hi, f.page_hi);
      protect(from, to, write ? PROT_NONE : PROT_READ);
    }
}

void note(uintptr_t address, bool host_writes, const Flight& f) {
  int n = num_faults.fetch_add(1);
  if (n >= NUM_FAULTS) return;
  auto& fault = faults[n];
  fault.address = address;
  fault.host_writes = host_writes;
  fault.copy_writes = f.write;
  fault.stream = f.step.stream;
  memcpy(fault.name, f.name, sizeof fault.name);
  fault.ready = true;
}

bool is_ours(uintptr_t address, bool host_writes) {
  bool found = std::any_of(std::begin(guarded), std::end(guarded),
                           [&](auto& range) { return range.lo <= address && address < range.hi; });
  bool copying = false;
  pid_t self = thread_id();
  for (auto& copier : copiers) copying = copying || copier == self;
  for (int i = 0; i < num_flights; i++) {
    auto& f = flights[i];
    if (!f.used || address < f.page_lo || address >= f.page_hi || copying) continue;
    if (address < f.lo || address >= f.hi || !(f.write || host_writes)) continue;
    if (thread_knows(f.step, f.known)) {
      f.used = false;
    } else {
      note(address, host_writes, f);
    }
  }
  return found;
}

void handle(int number, siginfo_t* info, void* context) {
  int error = errno;
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  bool host_writes = true;
#if defined(__x86_64__)
  host_writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
  if (info->si_code == SEGV_ACCERR && is_ours(address, host_writes)) {
    uintptr_t page = address & ~(PAGE - 1);
    mprotect(reinterpret_cast<void*>(page), PAGE, PROT_READ | PROT_WRITE);
    errno = error;
    return;
  }
  errno = error;
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    sigaction(number, &before, nullptr);  // the access is made again, and ends the process as it would have
  }
}

}  // namespace

void install_handler() {
  std::lock_guard<std::mutex> lock(mutex);
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (installed && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &handle) return;
  if (installed) return;  // somebody put a handler over ours, which hands on to us
  struct sigaction ours;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = &handle;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &before);
  installed = true;
}

void remove_handler() {
  std::lock_guard<std::mutex> lock(mutex);
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (!installed || !(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != &handle) return;
  sigaction(SIGSEGV, &before, nullptr);
  installed = false;
}

void set_guard(bool on) {
  guarding = on;
  auto all = [](const Step&) { return true; };
  if (!on) release(all, all);
}

Opened::Opened(uintptr_t lo, uintptr_t hi) : lo_(lo & ~(PAGE - 1)), hi_((hi + PAGE - 1) & ~(PAGE - 1)) {
  if (!guarding) return;
  pid_t self = thread_id();
  for (int i = 0; i < NUM_COPIERS && slot_ < 0; i++) {
    pid_t nobody = 0;
    if (copiers[i].compare_exchange_strong(nobody, self)) slot_ = i;
  }
  // A page that is closed meanwhile by another copy is opened by the handler.
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < num_flights; i++) {
    auto& f = flights[i];
    if (f.used) protect(std::max<uintptr_t>(lo_, f.page_lo), std::min<uintptr_t>(hi_, f.page_hi), PROT_READ | PROT_WRITE);
  }
}

Opened::~Opened() {
  if (slot_ < 0) return;
  copiers[slot_] = 0;
  std::lock_guard<std::mutex> lock(mutex);
  protect_again(lo_, hi_);
}

void close(uintptr_t lo, uintptr_t hi, bool write, const Step& step, const std::string& name, uintptr_t outer_lo,
           uintptr_t outer_hi) {
  if (!guarding) return;
  std::lock_guard<std::mutex> lock(mutex);
  uintptr_t page_lo = std::max(lo & ~(PAGE - 1), (outer_lo + PAGE - 1) & ~(PAGE - 1));
  uintptr_t page_hi = std::min((hi + PAGE - 1) & ~(PAGE - 1), outer_hi & ~(PAGE - 1));
  if (page_lo >= page_hi || !add_guarded((outer_lo + PAGE - 1) & ~(PAGE - 1), outer_hi & ~(PAGE - 1))) return;
  for (int i = 0; i < NUM_FLIGHTS; i++) {
    auto& f = flights[i];
    if (f.used) continue;
    f.lo = lo, f.hi = hi, f.page_lo = page_lo, f.page_hi = page_hi, f.write = write, f.step = step, f.known = false;
    strncpy(f.name, name.c_str(), sizeof f.name - 1);
    f.used = true;
    if (num_flights <= i) num_flights = i + 1;
    break;
  }
  protect_again(page_lo, page_hi);
}

void release(const std::function<bool(const Step&)>& is_known_to_all, const std::function<bool(const Step&)>& is_known) {
  if (!num_flights) return;
  std::lock_guard<std::mutex> lock(mutex);
  int used = 0;
  for (int i = 0; i < num_flights; i++) {
    auto& f = flights[i];
    if (f.used && !f.known) f.known = is_known(f.step);
    if (f.used && f.known && is_known_to_all(f.step)) {
      f.used = false;
      protect(f.page_lo, f.page_hi, PROT_READ | PROT_WRITE);
      protect_again(f.page_lo, f.page_hi);
    }
    if (f.used) used = i + 1;
  }
  num_flights = used;
}

void use(uintptr_t lo, uintptr_t hi, bool write) {
  if (!guarding) return;
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < num_flights; i++) {
    auto& f = flights[i];
    if (!f.used || f.lo >= hi || f.hi <= lo) continue;
    if (thread_knows(f.step, f.known)) {
      f.used = false;
    } else if (f.write || write) {
      note(std::max<uintptr_t>(lo, f.lo), write, f);
    }
  }
  protect(lo & ~(PAGE - 1), (hi + PAGE - 1) & ~(PAGE - 1), PROT_READ | PROT_WRITE);
  protect_again(lo & ~(PAGE - 1), (hi + PAGE - 1) & ~(PAGE - 1));
}

void forget(uintptr_t lo, uintptr_t hi) {
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < num_flights; i++) {
    auto& f = flights[i];
    if (!f.used || f.page_lo >= hi || f.page_hi <= lo) continue;
    f.used = false;
    protect(f.page_lo, f.page_hi, PROT_READ | PROT_WRITE);
  }
  for (auto& range : guarded)
    if (lo <= range.lo && range.hi <= hi) range.hi = 0;
}

std::vector<std::string> take_faults() {
  std::vector<std::string> found;
  std::lock_guard<std::mutex> lock(mutex);
  int n = std::min(num_faults.load(), NUM_FAULTS);
  for (int i = 0; i < n; i++) {
    auto& f = faults[i];
    if (!f.ready.exchange(false)) continue;
    Layout byte = dense_layout(f.address, 1);
    found.push_back(std::string("an access of the host ") + (f.host_writes ? "writes " : "reads ") + name_of_bytes(byte) +
                    ", but no event orders it after: " + f.name + " on " + name_of_party(f.stream) +
                    (f.copy_writes ? " writes" : " reads") + " them");
  }
  num_faults = 0;
  return found;
}

}  // namespace sim::pages
