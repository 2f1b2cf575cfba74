// What is looked at before a file is believed, as Python sees it.
#include <vector>

#include "bindings.h"
#include "pickle_scan.h"
#include "tiling.h"

namespace pyckpt {
namespace {

size_t scan(const py::object& buffer, uint32_t depth, uint32_t work_per_byte) {
  const ContiguousBuffer view(buffer);
  GilRelease release;
  return scan_pickle(view.data(), view.size(), {depth, work_per_byte});
}

void append(const py::handle& numbers, std::vector<int64_t>* to) {
  if (!PyTuple_Check(numbers.ptr())) throw py::type_error("sizes and offsets must be tuples");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers.ptr()); ++i) {
    const int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.ptr(), i));
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    to->push_back(number);
  }
}

bool tiles(const py::tuple& size, const py::list& offsets, const py::list& sizes) {
  std::vector<int64_t> whole, begins, extents;
  append(size, &whole);
  for (const py::handle offset : offsets) append(offset, &begins);
  for (const py::handle extent : sizes) append(extent, &extents);
  GilRelease release;
  return is_tiling(whole, begins, extents);
}

}  // namespace

void register_checks(py::module_& module) {
  module.def("scan_pickle", &scan, py::arg("buffer"), py::kw_only(), py::arg("depth"),
             py::arg("work_per_byte"));
  module.def("is_tiling", &tiles, py::arg("size"), py::arg("offsets"), py::arg("sizes"));
}

}  // namespace pyckpt
