// tpkernels._host: the host core for Python, without torch. Signatures and docstrings: tpkernels/_host.pyi.
#include "python/host.hpp"

PYBIND11_MODULE(_host, m) {
  m.doc() = "Decomposition, tile order, plans and progress of tpkernels' matrix products (pure functions).";
  tpk::python::bind_schedule(m);
  tpk::python::bind_shards(m);
  tpk::python::bind_plan(m);
  tpk::python::bind_progress(m);
  tpk::python::bind_hopper(m);
  tpk::python::bind_portable(m);
}
