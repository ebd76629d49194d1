// Vector clocks, accesses and races. An access is kept until a later one covers it or all of the host is after it.
#include "order.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "pages.h"

namespace sim {

namespace {

// kept while some later use could still come without an order
struct Access {
  Layout bytes;
  Step step;
  bool write;
  std::string name;
};

struct Block {
  uint64_t nbytes = 0;
  int64_t stream = 0;          // the one that it was allocated on
  std::set<int64_t> streams;   // record_stream
  std::vector<Access> accesses;
};

std::mutex mutex;
std::map<int64_t, Clock> clocks;
std::map<uintptr_t, Clock> places;  // what was handed over there
thread_local Clock* own = nullptr;  // the clock of this thread, once it has joined; only this thread changes it
std::map<uintptr_t, Block> blocks;
Block elsewhere;  // the accesses outside of every block: host memory
std::vector<std::string> races;
std::set<std::string> seen_races;
std::map<int64_t, uint64_t> hung_streams;  // stream: hang epoch
uint64_t hang_epoch = 1;
bool hang = false;
int64_t query_delay = 0;

using Lock = std::lock_guard<std::mutex>;

void merge(Clock& into, const Clock& from) {
  for (auto& [party, step] : from) {
    auto& known = into[party];
    known = std::max(known, step);
  }
}

bool is_before(const Step& step, const Clock& clock) {
  auto found = clock.find(step.stream);
  return found != clock.end() && found->second >= step.number;
}

// What the calling thread knows.
Clock& mine() { return own ? *own : clocks[HOST]; }

bool is_known(const Step& step) { return is_before(step, clocks[HOST]); }

bool is_known_to_all(const Step& step) {
  for (auto& [party, clock] : clocks) {
    if (party > HOST) break;
    if (!is_before(step, clock)) return false;
  }
  return is_known(step);
}

Block& block_of(uintptr_t address) {
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return elsewhere;
  auto& [start, block] = *std::prev(after);
  return address < start + block.nbytes ? block : elsewhere;
}

void add_race(std::string race) {
  if (races.size() < 1000 && seen_races.insert(race).second) races.push_back(std::move(race));
}

std::string name_of_side(const std::string& name, int64_t party, bool write, const Layout& bytes) {
  return name + " on " + name_of_party(party) + (write ? " writes " : " reads ") + name_of_bytes(bytes);
}

// Report who used the bytes with no order between; forget the accesses that need no record any more.
void check_in(Block& block, const Use& use, const Step& step, const std::string& name) {
  const Clock& before_it = step.stream == HOST ? mine() : clocks[step.stream];
  auto& accesses = block.accesses;
  size_t kept = 0;
  for (size_t i = 0; i < accesses.size(); i++) {
    auto& a = accesses[i];
    bool before = is_before(a.step, before_it);
    if (!before && (a.write || use.write) && share_byte(a.bytes, use.bytes))
      add_race(name_of_side(name, step.stream, use.write, use.bytes) + ", but no event orders it after: " +
               name_of_side(a.name, a.step.stream, a.write, a.bytes));
    bool covered = before && step.stream != HOST && (use.write || !a.write) && covers(use.bytes, a.bytes);
    if (covered || is_known_to_all(a.step)) continue;
    if (kept != i) accesses[kept] = std::move(a);
    kept++;
  }
  accesses.resize(kept);
}

void check(const Use& use, const Step& step, const std::string& name) {
  if (use.bytes.empty()) return;
  auto& first = block_of(use.bytes.lo);
  check_in(first, use, step, name);
  auto next = blocks.upper_bound(use.bytes.lo);
  for (; next != blocks.end() && next->first < use.bytes.hi; ++next) check_in(next->second, use, step, name);
  if (&first != &elsewhere && !elsewhere.accesses.empty()) check_in(elsewhere, use, step, name);
  // What the host does is ordered before all that is submitted later: it needs no record.
  if (step.stream != HOST) first.accesses.push_back({use.bytes, step, use.write, name});
}

void host_learns(const Clock& clock) {
  merge(clocks[HOST], clock);
  if (own) merge(*own, clock);
  pages::release(is_known_to_all, is_known);
}

bool is_hung(uint64_t epoch) { return epoch == hang_epoch; }

[[noreturn]] void wait_in_vain() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  throw std::runtime_error("the simulated event never completes");
}

}  // namespace

std::string name_of_party(int64_t party) { return party == HOST ? "the host" : "stream " + std::to_string(party); }

std::string name_of_bytes(const Layout& bytes) {
  char text[96];
  snprintf(text, sizeof text, "%s%llu bytes at 0x%llx", bytes.dense() ? "" : "some of ",
           (unsigned long long)(bytes.hi - bytes.lo), (unsigned long long)bytes.lo);
  return text;
}

Step submit(int64_t stream, const std::string& name, const std::vector<Use>& uses) {
  Lock lock(mutex);
  auto& clock = clocks[stream];
  merge(clock, mine());
  Step step{stream, ++clock[stream]};
  for (auto& use : uses) check(use, step, name);
  return step;
}

void also_uses(const Step& step, const std::string& name, const std::vector<Use>& uses) {
  Lock lock(mutex);
  for (auto& use : uses) check(use, step, name);
}

void host_uses(const Layout& bytes, bool write, const std::string& name) {
  Lock lock(mutex);
  check({bytes, write}, {HOST, 0}, name);
}

void host_after_stream(int64_t stream) {
  Lock lock(mutex);
  host_learns(clocks[stream]);
}

void host_after_device() {
  Lock lock(mutex);
  Clock all;
  for (auto& [party, clock] : clocks) merge(all, clock);
  host_learns(all);
}

void join_as_main() {
  Lock lock(mutex);
  own = &clocks[MAIN];
}

void join() {
  struct Party {  // until the thread ends
    int64_t number;
    ~Party() {
      Lock lock(mutex);
      own = nullptr;
      clocks.erase(number);
    }
  };
  static std::atomic<int64_t> last{MAIN};
  static thread_local Party party{--last};
  Lock lock(mutex);
  own = &clocks[party.number];
}

void hand_over(uintptr_t place, uint64_t nbytes) {
  Lock lock(mutex);
  for (uintptr_t at = place; at < place + nbytes; at += 4096) merge(places[at], mine());
}

void take_over(uintptr_t place, uint64_t nbytes) {
  Lock lock(mutex);
  for (auto at = places.lower_bound(place); own && at != places.end() && at->first < place + nbytes; ++at)
    merge(*own, at->second);
}

bool thread_knows(const Step& step, bool known) { return own ? is_before(step, *own) : known; }

void record_event(Event& event, int64_t stream) {
  Lock lock(mutex);
  auto& clock = clocks[stream];
  merge(clock, mine());
  event.clock = clock;
  event.stream = stream;
  event.recorded = true;
  event.time_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  event.queries = query_delay;
  bool stuck = hung_streams.count(stream) && is_hung(hung_streams[stream]);
  event.hung = hang || stuck ? hang_epoch : 0;
  if (hang) hung_streams[stream] = hang_epoch;
}

void stream_waits(int64_t stream, Event& event) {
  Lock lock(mutex);
  if (!event.recorded) return;
  merge(clocks[stream], event.clock);
  if (is_hung(event.hung)) hung_streams[stream] = hang_epoch;
}

bool query_event(Event& event) {
  Lock lock(mutex);
  if (!event.recorded) return true;
  if (is_hung(event.hung)) return false;
  if (event.queries > 0) {
    event.queries--;
    return false;
  }
  host_learns(event.clock);
  return true;
}

void host_waits_event(Event& event) {
  bool stuck;
  {
    Lock lock(mutex);
    stuck = is_hung(event.hung);
    if (event.recorded && !stuck) {
      event.queries = 0;
      host_learns(event.clock);
    }
  }
  if (stuck) wait_in_vain();
}

bool query_stream(int64_t stream) {
  Lock lock(mutex);
  if (hung_streams.count(stream) && is_hung(hung_streams[stream])) return false;
  host_learns(clocks[stream]);
  return true;
}

void check_not_hung(int64_t stream) {
  bool stuck;
  {
    Lock lock(mutex);
    stuck = hung_streams.count(stream) && is_hung(hung_streams[stream]);
  }
  if (stuck) wait_in_vain();
}

void check_device_not_hung() {
  bool stuck;
  {
    Lock lock(mutex);
    stuck = std::any_of(hung_streams.begin(), hung_streams.end(), [](auto& s) { return is_hung(s.second); });
  }
  if (stuck) wait_in_vain();
}

void add_block(uintptr_t address, uint64_t nbytes, int64_t stream) {
  Lock lock(mutex);
  blocks[address] = {nbytes, stream, {}, {}};
}

void remove_block(uintptr_t address, const std::string& how) {
  Lock lock(mutex);
  auto found = blocks.find(address);
  if (found == blocks.end()) return;
  auto& block = found->second;
  // The next owner gets the memory in the order of the stream that it was allocated on; the host submits to that. Who
  // frees it has the last reference: the threads that had others have handed over with them what they knew.
  Clock owner = block.stream == HOST ? Clock() : clocks[block.stream];
  merge(owner, clocks[HOST]);
  for (auto& a : block.accesses)
    if (!is_before(a.step, owner) && !block.streams.count(a.step.stream))
      add_race(how + " " + std::to_string(block.nbytes) + " bytes at " + name_of_party(block.stream) +
               ", but no event orders it after: " + name_of_side(a.name, a.step.stream, a.write, a.bytes));
  blocks.erase(found);
}

void forget_block(uintptr_t address) {
  Lock lock(mutex);
  blocks.erase(address);
}

void use_block_on(uintptr_t address, int64_t stream) {
  Lock lock(mutex);
  auto& block = block_of(address);
  if (&block != &elsewhere) block.streams.insert(stream);
}

void report(std::string race) {
  Lock lock(mutex);
  add_race(std::move(race));
}

std::vector<std::string> take_races() {
  for (auto& fault : pages::take_faults()) report(std::move(fault));
  Lock lock(mutex);
  seen_races.clear();
  return std::exchange(races, {});
}

void set_query_delay(int64_t n) {
  Lock lock(mutex);
  query_delay = n;
}

void set_hang_events(bool on) {
  Lock lock(mutex);
  hang = on;
}

void reset_order() {
  pages::take_faults();
  Lock lock(mutex);
  Clock all;
  for (auto& [party, clock] : clocks) merge(all, clock);
  for (auto& [party, clock] : clocks)
    if (party < HOST) merge(clock, all);
  host_learns(all);  // steps go on counting: events recorded before stay right
  places.clear();
  for (auto& [address, block] : blocks) block.accesses.clear();
  elsewhere.accesses.clear();
  races.clear();
  seen_races.clear();
  hung_streams.clear();
  hang_epoch++;
  hang = false;
  query_delay = 0;
}

}  // namespace sim
