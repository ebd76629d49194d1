// Counters, the log and the planned faults.
#include "ledger.h"

#include <mutex>

namespace sim {

namespace {

std::mutex mutex;
std::vector<Traffic> copies(NUM_DIRECTIONS);
std::map<std::pair<std::string, std::string>, int64_t> blocked;
std::map<std::pair<std::string, int>, std::map<std::string, int64_t>> called;
std::vector<LogEntry> entries;
std::atomic<bool> logging{false};
int64_t copies_to_failure = 0, registrations_to_failure = 0, allocations_to_failure = 0;
std::function<std::string()> name_of_thread;

using Lock = std::lock_guard<std::mutex>;

// Asked once a thread, outside of every lock: it takes the interpreter's.
const std::string& this_thread() {
  static thread_local std::string name;
  if (name.empty()) name = name_of_thread ? name_of_thread() : "?";
  return name;
}

bool counts_down(int64_t& left) { return left > 0 && --left == 0; }

}  // namespace

void count_copy(Direction direction, int64_t nbytes) {
  Lock lock(mutex);
  copies[direction].num++;
  copies[direction].nbytes += nbytes;
}

std::vector<Traffic> traffic() {
  Lock lock(mutex);
  return copies;
}

void count_blocking(const std::string& kind) {
  auto& thread = this_thread();
  {
    Lock lock(mutex);
    blocked[{thread, kind}]++;
  }
  log(-1, "block", kind, 0, 0);
}

std::map<std::pair<std::string, std::string>, int64_t> blocking() {
  Lock lock(mutex);
  return blocked;
}

void note_call(int device, const char* what) noexcept {
  if (!logging) return;
  auto& thread = this_thread();
  Lock lock(mutex);
  called[{thread, device}][what]++;
}

std::map<std::pair<std::string, int>, std::map<std::string, int64_t>> calls() {
  Lock lock(mutex);
  return called;
}

bool is_logging() { return logging; }

void set_logging(bool on) {
  Lock lock(mutex);
  if (on) entries.clear(), called.clear();
  logging = on;
}

void log(int64_t stream, const std::string& kind, const std::string& name, int64_t nbytes, uint64_t address) {
  if (!logging) return;
  auto& thread = this_thread();
  Lock lock(mutex);
  entries.emplace_back(entries.size(), stream, kind, name, nbytes, address, thread);
}

std::vector<LogEntry> logged() {
  Lock lock(mutex);
  return entries;
}

void plan_failed_copy(int64_t k) {
  Lock lock(mutex);
  copies_to_failure = k;
}

void plan_failed_registration(int64_t k) {
  Lock lock(mutex);
  registrations_to_failure = k;
}

void plan_failed_allocation(int64_t k) {
  Lock lock(mutex);
  allocations_to_failure = k;
}

bool copy_fails() {
  Lock lock(mutex);
  return counts_down(copies_to_failure);
}

bool registration_fails() {
  Lock lock(mutex);
  return counts_down(registrations_to_failure);
}

bool allocation_fails() {
  Lock lock(mutex);
  return counts_down(allocations_to_failure);
}

void set_name_of_thread(std::function<std::string()> name) { name_of_thread = std::move(name); }

void reset_ledger() {
  Lock lock(mutex);
  copies.assign(NUM_DIRECTIONS, {});
  blocked.clear();
  entries.clear();
  called.clear();
  logging = false;
  copies_to_failure = registrations_to_failure = allocations_to_failure = 0;
}

}  // namespace sim
