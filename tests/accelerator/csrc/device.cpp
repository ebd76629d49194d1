// The devices as PyTorch sees them: streams and events (device guard), hooks, generators, autograd's threads for them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <thread>
#include <vector>

#include "device.h"
#include "generator.h"
#include "ledger.h"
#include "memory.h"
#include "order.h"
#include "tensors.h"

namespace sim {

namespace {

using c10::DeviceIndex;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct DeviceEvent final : Event {
  explicit DeviceEvent(DeviceIndex device) : device(device) {}
  DeviceIndex device;
};

c10::Stream stream_of(DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}
DeviceEvent& event_of(void* event) { return *static_cast<DeviceEvent*>(event); }
uint64_t address_of(void* event) { return reinterpret_cast<uint64_t>(event); }

std::mutex streams_mutex;
std::vector<int64_t> streams[NUM_DEVICES] = {{default_stream(0)}, {default_stream(1)}};

std::vector<int64_t> streams_of(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams[device];
}

// Like those of CUDA's calls that set the thread's own device again afterwards: that is a call on that device too, and
// there it sets up a context of hundreds of megabytes.
class Call {
 public:
  Call(DeviceIndex device, const char* what) : before_(current_device()) {
    set_device(device);
    note_call(device, what);
  }
  ~Call() { set_device(before_); }

 private:
  DeviceIndex before_;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current_device()}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { go_back_to_device(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return is_enabled() ? NUM_DEVICES : 0; }

  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device);
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    auto index = index_of(device);
    return stream_of(index, default_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = index_of(device);
    note_call(index, "new stream");
    static int64_t last = NUM_DEVICES - 1;
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams[index].push_back(++last);
    return stream_of(index, last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    note_call(stream.device_index(), "query stream");
    return query_stream(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_call(stream.device_index(), "synchronize stream");
    count_blocking("stream synchronize");
    check_not_hung(stream.id());
    host_after_stream(stream.id());
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Call call(device, "synchronize device");
    count_blocking("device synchronize");
    for (int64_t stream : streams_of(device)) check_not_hung(stream);
    for (int64_t stream : streams_of(device)) host_after_stream(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_allocator()->recordStream(ptr, stream);
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Call call(stream.device_index(), "record event");
    if (!*event) *event = new DeviceEvent(stream.device_index());
    record_event(event_of(*event), stream.id());
    log(stream.id(), "record", "", 0, address_of(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Call call(stream.device_index(), "wait for event");
    stream_waits(stream.id(), event_of(event));
    log(stream.id(), "wait", "", 0, address_of(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    note_call(event_of(event).device, "query event");  // as CUDA's does, it asks whatever device is current
    return query_event(event_of(event));
  }
  void synchronizeEvent(void* event) const override {
    count_blocking("event synchronize");
    if (!event) return;
    note_call(event_of(event).device, "synchronize event");
    host_waits_event(event_of(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    if (!event) return;
    Call call(event_of(event).device, "destroy event");
    delete &event_of(event);
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    return event_of(end).time_ms - event_of(start).time_ms;
  }
};

struct Generator final : c10::GeneratorImpl {
  Generator(at::Generator cpu, c10::Device device)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  static c10::DeviceType device_type() { return TYPE; }
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone(), device()); }

  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_enabled(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_enabled(); }
  DeviceIndex deviceCount() const override { return is_enabled() ? NUM_DEVICES : 0; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return go_back_to_device(device); }
  bool isPinnedPtr(const void* address) const override {
    return is_enabled() && is_registered(reinterpret_cast<uintptr_t>(address));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// Autograd starts its device threads once, at the process's first backward; later devices would have none.
struct Engine : torch::autograd::Engine {
  static void start_threads_of_devices() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    auto& queues = engine.*(&Engine::device_ready_queues_);
    if (!queues.empty()) return;
    for (int device = 0; device < NUM_DEVICES; device++)
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
    for (int device = 0; device < NUM_DEVICES; device++)
      std::thread([&engine, device, queue = queues[size_t(device)]] {
        join_as_main();
        engine.thread_init(device, queue, /*should_increment=*/true);
      }).detach();
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void register_device() {
  static bool once = [] {
    c10::SetAllocator(TYPE, device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}

void start_threads_of_autograd() { Engine::start_threads_of_devices(); }

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<Generator>(at::detail::createCPUGenerator(),
                                       c10::Device(TYPE, index_of(c10::Device(TYPE, device))));
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return generators->at(size_t(index_of(c10::Device(TYPE, device))));
}

PyObject* default_generator_in_python(int device) {
  static PyObject* objects[NUM_DEVICES] = {};
  if (!objects[device]) objects[device] = THPGenerator_initDefaultGenerator(default_generator(DeviceIndex(device)));
  return objects[device];
}

at::Generator cpu_generator_of(const std::optional<at::Generator>& generator) {
  const auto& ours = generator.has_value() && generator->defined() ? *generator : default_generator(current_device());
  TORCH_CHECK(ours.device().type() == TYPE, "Expected a 'sim' device type for generator but found '",
              ours.device().type(), "'");
  return static_cast<Generator*>(ours.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace sim
