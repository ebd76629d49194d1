// The Python module: what tests/accelerator/simulated.py calls. No tensors pass here, only addresses.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.h"
#include "ledger.h"
#include "order.h"
#include "pages.h"

namespace py = pybind11;

namespace sim {  // of memory.h, which needs PyTorch's headers
void set_memory_limit(int64_t nbytes, int device);
void empty_cache();
void set_poison(bool on);
void set_allocation_writes(bool on);
void host_register(uintptr_t address, int64_t nbytes);
void host_unregister(uintptr_t address);
void set_enabled(bool on);
bool is_enabled();
}  // namespace sim

using Sizes = std::vector<int64_t>;

static void host_touch(uintptr_t address, int64_t itemsize, const Sizes& sizes, const Sizes& strides, bool write) {
  sim::host_uses(sim::strided_layout(address, uint64_t(itemsize), sizes.data(), strides.data(), int64_t(sizes.size())),
                 write, "host_touch");
  sim::log(sim::HOST, "host", write ? "write" : "read", 0, address);
}

static std::vector<std::pair<int64_t, int64_t>> traffic() {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (auto& t : sim::traffic()) found.emplace_back(t.num, t.nbytes);
  return found;
}

// The interpreter's lock is given up around the call: the functions take locks that other threads hold meanwhile.
template <class F>
static void def(py::module_& m, const char* name, F function) {
  m.def(name, function, py::call_guard<py::gil_scoped_release>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  def(m, "register_device", &sim::register_device);
  def(m, "start_threads_of_autograd", &sim::start_threads_of_autograd);
  m.def("default_generator", [](int device) {
    return py::reinterpret_borrow<py::object>(sim::default_generator_in_python(device));
  });
  def(m, "set_enabled", &sim::set_enabled);
  def(m, "is_enabled", &sim::is_enabled);
  def(m, "install_handler", &sim::pages::install_handler);
  def(m, "remove_handler", &sim::pages::remove_handler);
  def(m, "set_guard", &sim::pages::set_guard);
  def(m, "host_touch", &host_touch);
  def(m, "use_pages", &sim::pages::use);
  def(m, "join_as_main", &sim::join_as_main);
  def(m, "join", &sim::join);
  def(m, "hand_over", &sim::hand_over);
  def(m, "take_over", &sim::take_over);
  def(m, "races", &sim::take_races);
  def(m, "set_query_delay", &sim::set_query_delay);
  def(m, "set_hang_events", &sim::set_hang_events);
  def(m, "reset_order", &sim::reset_order);
  def(m, "reset_ledger", &sim::reset_ledger);
  def(m, "traffic", &traffic);
  def(m, "blocking", &sim::blocking);
  def(m, "set_logging", &sim::set_logging);
  def(m, "logged", &sim::logged);
  def(m, "plan_failed_copy", &sim::plan_failed_copy);
  def(m, "plan_failed_registration", &sim::plan_failed_registration);
  def(m, "plan_failed_allocation", &sim::plan_failed_allocation);
  def(m, "calls", &sim::calls);
  def(m, "empty_cache", &sim::empty_cache);
  def(m, "set_memory_limit", &sim::set_memory_limit);
  def(m, "set_poison", &sim::set_poison);
  def(m, "set_allocation_writes", &sim::set_allocation_writes);
  def(m, "host_register", &sim::host_register);
  def(m, "host_unregister", &sim::host_unregister);
  m.def("set_name_of_thread", [](py::object name) {
    auto* kept = new py::object(std::move(name));  // for as long as the process lives
    sim::set_name_of_thread([kept]() -> std::string {
      if (!Py_IsInitialized()) return "?";
      py::gil_scoped_acquire lock;
      return (*kept)().cast<std::string>();
    });
  });
}
