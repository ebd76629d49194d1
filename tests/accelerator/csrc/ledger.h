// What was asked of the device: counted copies, calls that block the host (by thread), the log, and the planned faults.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace sim {

enum Direction { HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, PAGEABLE_TO_DEVICE, DEVICE_TO_PAGEABLE, NUM_DIRECTIONS };

struct Traffic {
  int64_t num = 0, nbytes = 0;
};

using LogEntry = std::tuple<int64_t, int64_t, std::string, std::string, int64_t, uint64_t, std::string>;

void count_copy(Direction direction, int64_t nbytes);
std::vector<Traffic> traffic();
void count_blocking(const std::string& kind);
std::map<std::pair<std::string, std::string>, int64_t> blocking();  // (thread, kind): calls

// While the log is kept: which thread has called which device, and for what.
void note_call(int device, const char* what) noexcept;
std::map<std::pair<std::string, int>, std::map<std::string, int64_t>> calls();

bool is_logging();
void set_logging(bool on);  // starts an empty log, or ends it
void log(int64_t stream, const std::string& kind, const std::string& name, int64_t nbytes, uint64_t address);
std::vector<LogEntry> logged();

// The k-th call from now fails; 0: none.
void plan_failed_copy(int64_t k);
void plan_failed_registration(int64_t k);
void plan_failed_allocation(int64_t k);
bool copy_fails();
bool registration_fails();
bool allocation_fails();

void set_name_of_thread(std::function<std::string()> name);
void reset_ledger();

}  // namespace sim
