// Registration of the device with PyTorch.
#pragma once

typedef struct _object PyObject;

namespace sim {

void register_device();           // once a process; can't be undone
void start_thread_of_autograd();  // where a backward of this device runs
PyObject* default_generator_in_python();

}  // namespace sim
