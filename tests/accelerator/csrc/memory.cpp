// The device's allocator, pinned host memory, and the thread's current stream.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "ledger.h"
#include "order.h"
#include "pages.h"

namespace sim {

namespace {

constexpr size_t ROUND = 512, LARGE = size_t(1) << 20, MOST_CACHED = size_t(64) << 20;
const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);

thread_local int64_t stream_of_thread = 0;
std::atomic<bool> enabled{false};

size_t rounded(size_t nbytes) { return (nbytes + ROUND - 1) / ROUND * ROUND; }
size_t whole_pages(size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, DEVICE};
    size_t size = rounded(nbytes);
    void* memory = take(size, nbytes);
    if (poison) memset(memory, 0xFF, size);
    auto address = reinterpret_cast<uintptr_t>(memory);
    add_block(address, size, current_stream());
    if (allocation_writes) submit(current_stream(), "allocate", {{dense_layout(address, size), true}});
    log(current_stream(), "allocate", "", int64_t(size), address);
    return {memory, memory, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  bool initialized() override { return enabled; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [size, free] : cache_)
      for (void* memory : free) drop(memory, size);
    cache_.clear();
    cached_ = 0;
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get()) use_block_on(reinterpret_cast<uintptr_t>(ptr.get()), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { each([](auto& stat) { stat.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex) override { each([](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t total = limit_();
    size_t live = size_t(stats_.allocated_bytes[0].current);
    return {total > live ? total - live : 0, total};
  }

  std::atomic<size_t> limit{0};
  std::atomic<bool> poison{true}, allocation_writes{false};

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  size_t limit_() const {
    static const size_t machine = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
    return limit ? limit.load() : machine;
  }
  void* take(size_t size, size_t requested) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t live = size_t(stats_.allocated_bytes[0].current);
    if (live + size > limit_() || allocation_fails()) {
      stats_.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", requested, " bytes; ", live,
                       " of ", limit_(), " bytes are allocated.");
    }
    void* memory = nullptr;
    auto found = cache_.find(size);
    if (found != cache_.end() && !found->second.empty()) {
      memory = found->second.back();
      found->second.pop_back();
      cached_ -= size;
    } else if (size >= LARGE) {
      memory = mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "sim: the machine has no ", size, " bytes left");
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&memory, ROUND, size) == 0, "sim: no memory left");
    }
    sizes_[memory] = {size, requested};
    count(int64_t(size), int64_t(requested), +1);
    return memory;
  }
  static void release(void* memory);
  void give(void* memory) {
    remove_block(reinterpret_cast<uintptr_t>(memory), "the host frees");
    std::lock_guard<std::mutex> lock(mutex_);
    auto [size, requested] = sizes_[memory];
    sizes_.erase(memory);
    count(-int64_t(size), -int64_t(requested), -1);
    if (cached_ + size <= MOST_CACHED) {
      cache_[size].push_back(memory);
      cached_ += size;
    } else {
      drop(memory, size);
    }
  }
  static void drop(void* memory, size_t size) {
    if (size >= LARGE) {
      munmap(memory, whole_pages(size));
    } else {
      free(memory);
    }
  }
  void count(int64_t size, int64_t requested, int64_t num) {
    auto add = [](c10::CachingAllocator::StatArray& stat, int64_t n) {
      n > 0 ? stat[0].increase(size_t(n)) : stat[0].decrease(size_t(-n));
    };
    for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes}) add(*stat, size);
    add(stats_.requested_bytes, requested);
    for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active}) add(*stat, num);
    (num > 0 ? stats_.num_device_alloc : stats_.num_device_free)++;
  }
  template <class F>
  void each(F change) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes,
                       &stats_.allocation, &stats_.segment, &stats_.active})
      change((*stat)[0]);
  }

  std::mutex mutex_;
  Stats stats_;
  std::unordered_map<void*, std::pair<size_t, size_t>> sizes_;  // allocated, requested
  std::unordered_map<size_t, std::vector<void*>> cache_;
  size_t cached_ = 0;
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;  // never destroyed: tensors may outlive everything
  return *memory;
}

void DeviceMemory::release(void* memory) {
  if (memory) device_memory().give(memory);
}

std::mutex registered_mutex;
std::map<uintptr_t, uintptr_t> registered;  // start: end

void add_registration(uintptr_t lo, uintptr_t hi) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto next = registered.lower_bound(lo);
  bool meets = next != registered.end() && next->first < hi;
  if (next != registered.begin()) meets = meets || std::prev(next)->second > lo;
  TORCH_CHECK(!meets, "sim: part or all of the memory is already registered");
  registered[lo] = hi;
}

bool drop_registration(uintptr_t lo) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  return registered.erase(lo) == 1;
}

// Pinned memory that PyTorch asks for: whole pages, registered while they live.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK(enabled, "sim: no accelerator is available to pin memory for");
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    size_t size = whole_pages(nbytes) + 4096;  // the first page keeps the size
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "sim: no memory to pin");
    *static_cast<size_t*>(base) = size;
    auto address = reinterpret_cast<uintptr_t>(base) + 4096;
    add_registration(address, address + size - 4096);
    add_block(address, size - 4096, HOST);
    auto* memory = reinterpret_cast<void*>(address);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }

 private:
  static void release(void* memory) {
    if (!memory) return;
    auto address = reinterpret_cast<uintptr_t>(memory);
    void* base = reinterpret_cast<void*>(address - 4096);
    // Like CUDA's host allocator, which keeps the pages until the copies in flight have ended: no race.
    forget_block(address);
    size_t size = *static_cast<size_t*>(base);
    pages::forget(address, address + size - 4096);
    drop_registration(address);
    munmap(base, size);
  }
};

}  // namespace

c10::DeviceAllocator* device_allocator() { return &device_memory(); }

c10::Allocator* pinned_allocator() {
  static auto* memory = new PinnedMemory;
  return memory;
}

void set_memory_limit(int64_t nbytes) { device_memory().limit = size_t(nbytes); }
void set_poison(bool on) { device_memory().poison = on; }
void set_allocation_writes(bool on) { device_memory().allocation_writes = on; }

void host_register(uintptr_t address, int64_t nbytes) {
  TORCH_CHECK(!registration_fails(), "sim: the registration was planned to fail");
  TORCH_CHECK(nbytes > 0, "sim: invalid argument: ", nbytes, " bytes to register");
  add_registration(address, address + uint64_t(nbytes));
  add_block(address, uint64_t(nbytes), HOST);
  log(HOST, "register", "", nbytes, address);
}

void host_unregister(uintptr_t address) {
  auto range = Range{address, address};
  {
    std::lock_guard<std::mutex> lock(registered_mutex);
    auto found = registered.find(address);
    if (found != registered.end()) range.hi = found->second;
  }
  TORCH_CHECK(range.hi > range.lo && drop_registration(address), "sim: no registered memory starts at this address");
  remove_block(address, "the host unregisters");
  pages::forget(range.lo, range.hi);
  log(HOST, "unregister", "", int64_t(range.hi - range.lo), address);
}

bool is_registered(uintptr_t address) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto next = registered.upper_bound(address);
  return next != registered.begin() && std::prev(next)->second > address;
}

Range registration_of(uintptr_t lo, uintptr_t hi) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto next = registered.upper_bound(lo);
  if (next != registered.begin()) {
    auto [start, end] = *std::prev(next);
    if (lo < end) {
      TORCH_CHECK(hi <= end, "sim: invalid argument: the copy reaches over the end of a registration");
      return {start, end};
    }
  }
  TORCH_CHECK(next == registered.end() || next->first >= hi, "sim: invalid argument: the copy reaches into a registration");
  return {};
}

int64_t current_stream() { return stream_of_thread; }
int64_t exchange_stream(int64_t stream) { return std::exchange(stream_of_thread, stream); }
void set_enabled(bool on) { enabled = on; }
bool is_enabled() { return enabled; }

}  // namespace sim
