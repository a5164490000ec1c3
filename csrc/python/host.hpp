// The parts of the _host module. One function per source file.
#pragma once

#include <pybind11/pybind11.h>

namespace tpk::python {

void bind_schedule(pybind11::module_& m);
void bind_shards(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_progress(pybind11::module_& m);
void bind_hopper(pybind11::module_& m);
void bind_portable(pybind11::module_& m);

}  // namespace tpk::python
