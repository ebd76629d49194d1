// The device as PyTorch sees it: streams and events (device guard), hooks, the generator, autograd's thread for it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/engine.h>

#include <thread>

#include "device.h"
#include "generator.h"
#include "ledger.h"
#include "memory.h"
#include "order.h"
#include "tensors.h"

namespace sim {

namespace {

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
Event& event_of(void* event) { return *static_cast<Event*>(event); }
uint64_t address_of(void* event) { return reinterpret_cast<uint64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return is_enabled() ? 1 : 0; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int64_t> last{0};
    return stream_of(++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_stream(stream.id())); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_blocking("stream synchronize");
    check_not_hung(stream.id());
    host_after_stream(stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    count_blocking("device synchronize");
    check_device_not_hung();
    host_after_device();
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_allocator()->recordStream(ptr, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    record_event(event_of(*event), stream.id());
    log(stream.id(), "record", "", 0, address_of(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    stream_waits(stream.id(), event_of(event));
    log(stream.id(), "wait", "", 0, address_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query_event(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    count_blocking("event synchronize");
    if (event) host_waits_event(event_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return event_of(end).time_ms - event_of(start).time_ms;
  }
};

struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator cpu)
      : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  static c10::DeviceType device_type() { return DEVICE.type(); }
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }

  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_enabled(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_enabled(); }
  c10::DeviceIndex deviceCount() const override { return is_enabled() ? 1 : 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override {
    return is_enabled() && is_registered(reinterpret_cast<uintptr_t>(address));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// Autograd starts its device threads once, at the process's first backward; later devices would have none.
struct Engine : torch::autograd::Engine {
  static void start_thread_of_device() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    auto& queues = engine.*(&Engine::device_ready_queues_);
    if (!queues.empty()) return;
    auto queue = std::make_shared<torch::autograd::ReadyQueue>();
    queues.push_back(queue);
    std::thread([&engine, queue] { engine.thread_init(0, queue, /*should_increment=*/true); }).detach();
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void register_device() {
  static bool once = [] {
    c10::SetAllocator(DEVICE.type(), device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}

void start_thread_of_autograd() { Engine::start_thread_of_device(); }

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(new_generator());
  return *generator;
}

PyObject* default_generator_in_python() {
  static PyObject* object = THPGenerator_initDefaultGenerator(default_generator());
  return object;
}

at::Generator cpu_generator_of(const std::optional<at::Generator>& generator) {
  const auto& ours = generator.has_value() && generator->defined() ? *generator : default_generator();
  TORCH_CHECK(ours.device().type() == DEVICE.type(), "Expected a 'sim' device type for generator but found '",
              ours.device().type(), "'");
  return static_cast<Generator*>(ours.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace sim
