// The devices' allocator, pinned host memory, and each thread's current device and streams.
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

constexpr size_t ROUND = 512, LARGE = size_t(1) << 20;

thread_local DeviceIndex device_of_thread = 0;
thread_local int64_t streams_of_thread[NUM_DEVICES] = {default_stream(0), default_stream(1)};
std::atomic<bool> enabled{false};

size_t rounded(size_t nbytes) { return (nbytes + ROUND - 1) / ROUND * ROUND; }
size_t whole_pages(size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

// What a tensor no longer needs is kept for the next one of its stream and size, and counts as reserved: as with CUDA's
// allocator, the driver knows it as taken. An allocation that finds no room gives back all that its device has kept.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(c10::DeviceType::PrivateUse1, current_device());
    if (nbytes == 0) return {nullptr, device};
    note_call(device.index(), "allocate");
    size_t size = rounded(nbytes);
    void* memory = take(size, nbytes);
    if (poison) memset(memory, 0xFF, size);
    auto address = reinterpret_cast<uintptr_t>(memory);
    add_block(address, size, current_stream());
    if (allocation_writes) submit(current_stream(), "allocate", {{dense_layout(address, size), true}});
    log(current_stream(), "allocate", "", int64_t(size), address);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  bool initialized() override { return enabled; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& pool : pools_) give_back_kept(pool);
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get()) use_block_on(reinterpret_cast<uintptr_t>(ptr.get()), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return pool_of(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    note_call(device, "memory info");
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pool_of(device);
    size_t total = pool.total(), reserved = size_t(pool.stats.reserved_bytes[0].current);
    return {total > reserved ? total - reserved : 0, total};
  }
  void set_limit(DeviceIndex device, size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    pool_of(device).limit = limit;
  }

  std::atomic<bool> poison{true}, allocation_writes{false};

 private:
  struct Pool {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::map<std::pair<int64_t, size_t>, std::vector<void*>> kept;  // by stream and size
    size_t limit = 0;

    size_t total() const {
      static const size_t machine = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
      return limit ? limit : machine;
    }
  };
  struct Block {
    size_t size, requested;
    DeviceIndex device;
    int64_t stream;
  };

  Pool& pool_of(DeviceIndex device) { return pools_[index_of({c10::DeviceType::PrivateUse1, device})]; }
  void* take(size_t size, size_t requested) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block block{size, requested, current_device(), current_stream()};
    auto& pool = pools_[block.device];
    auto live = size_t(pool.stats.allocated_bytes[0].current);
    if (live + size > pool.total() || allocation_fails()) {
      pool.stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", requested, " bytes; ", live,
                       " of ", pool.total(), " bytes are allocated on device ", int(block.device), ".");
    }
    auto& kept = pool.kept[{block.stream, size}];
    void* memory = nullptr;
    if (!kept.empty()) {
      memory = kept.back();
      kept.pop_back();
    } else {
      memory = take_from_driver(pool, size);
    }
    blocks_[memory] = block;
    count(pool, block, +1);
    return memory;
  }
  void* take_from_driver(Pool& pool, size_t size) {
    if (size_t(pool.stats.reserved_bytes[0].current) + size > pool.total()) {
      pool.stats.num_alloc_retries++;
      give_back_kept(pool);
    }
    void* memory = nullptr;
    if (size >= LARGE) {
      memory = mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "sim: the machine has no ", size, " bytes left");
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&memory, ROUND, size) == 0, "sim: no memory left");
    }
    add(pool.stats.reserved_bytes, int64_t(size));
    add(pool.stats.segment, +1);
    pool.stats.num_device_alloc++;
    return memory;
  }
  void give_back_kept(Pool& pool) {
    for (auto& [key, kept] : pool.kept)
      for (void* memory : kept) {
        key.second >= LARGE ? (void)munmap(memory, whole_pages(key.second)) : free(memory);
        add(pool.stats.reserved_bytes, -int64_t(key.second));
        add(pool.stats.segment, -1);
        pool.stats.num_device_free++;
      }
    pool.kept.clear();
  }
  static void release(void* memory);
  void give(void* memory) {
    remove_block(reinterpret_cast<uintptr_t>(memory), "the host frees");
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(memory);
    Block block = found->second;
    blocks_.erase(found);
    auto& pool = pools_[block.device];
    count(pool, block, -1);
    pool.kept[{block.stream, block.size}].push_back(memory);
  }
  static void add(c10::CachingAllocator::StatArray& stat, int64_t n) {
    n > 0 ? stat[0].increase(size_t(n)) : stat[0].decrease(size_t(-n));
  }
  static void count(Pool& pool, const Block& block, int64_t num) {
    for (auto* stat : {&pool.stats.allocated_bytes, &pool.stats.active_bytes}) add(*stat, num * int64_t(block.size));
    add(pool.stats.requested_bytes, num * int64_t(block.requested));
    for (auto* stat : {&pool.stats.allocation, &pool.stats.active}) add(*stat, num);
  }
  template <class F>
  void each(DeviceIndex device, F change) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = pool_of(device).stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes,
                       &stats.allocation, &stats.segment, &stats.active})
      change((*stat)[0]);
  }

  std::mutex mutex_;
  Pool pools_[NUM_DEVICES];
  std::unordered_map<void*, Block> blocks_;  // that tensors have
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

void set_memory_limit(int64_t nbytes, int device) { device_memory().set_limit(DeviceIndex(device), size_t(nbytes)); }
void empty_cache() { device_memory().emptyCache({}); }
void set_poison(bool on) { device_memory().poison = on; }
void set_allocation_writes(bool on) { device_memory().allocation_writes = on; }

void host_register(uintptr_t address, int64_t nbytes) {
  note_call(current_device(), "register");
  TORCH_CHECK(!registration_fails(), "sim: the registration was planned to fail");
  TORCH_CHECK(nbytes > 0, "sim: invalid argument: ", nbytes, " bytes to register");
  add_registration(address, address + uint64_t(nbytes));
  add_block(address, uint64_t(nbytes), HOST);
  log(HOST, "register", "", nbytes, address);
}

void host_unregister(uintptr_t address) {
  note_call(current_device(), "unregister");
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

DeviceIndex index_of(c10::Device device) {
  DeviceIndex index = device.has_index() ? device.index() : current_device();
  TORCH_CHECK(index >= 0 && index < NUM_DEVICES, "sim: there is no device ", int(index), "; expected 0 to ",
              NUM_DEVICES - 1);
  return index;
}

DeviceIndex current_device() { return device_of_thread; }
void set_device(DeviceIndex device) {
  if (device == device_of_thread) return;
  device_of_thread = index_of({c10::DeviceType::PrivateUse1, device});
  note_call(device_of_thread, "set device");
}
DeviceIndex go_back_to_device(DeviceIndex device) noexcept { return std::exchange(device_of_thread, device); }

int64_t current_stream() { return current_stream(device_of_thread); }
int64_t current_stream(DeviceIndex device) { return streams_of_thread[device]; }
int64_t exchange_stream(DeviceIndex device, int64_t stream) { return std::exchange(streams_of_thread[device], stream); }
void set_enabled(bool on) { enabled = on; }
bool is_enabled() { return enabled; }

}  // namespace sim
