// Registration of the devices with PyTorch.
#pragma once

typedef struct _object PyObject;

namespace sim {

void register_device();            // once a process; can't be undone
void start_threads_of_autograd();  // where the backwards of each device run
PyObject* default_generator_in_python(int device);

}  // namespace sim
