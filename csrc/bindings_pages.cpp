// PageWatch, as Python sees it.
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "bindings.h"
#include "bindings_tensor.h"
#include "page_watch.h"

namespace pyckpt {
namespace {

const std::byte* memory_of(const at::Tensor& tensor) {
  if (!is_plain(tensor) || !tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) {
    throw std::invalid_argument("the tensor must be memory of the host without gaps");
  }
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

}  // namespace

void register_page_watch(py::module_& module) {
  py::class_<PageWatch>(module, "PageWatch")
      .def(py::init<>())
      .def(
          "watch",
          [](PageWatch& watch, const at::Tensor& tensor) {
            const std::byte* const data = memory_of(tensor);
            GilRelease release;
            return watch.watch(data, tensor.nbytes());
          },
          py::arg("tensor"))
      .def(
          "is_unwritten",
          [](PageWatch& watch, const at::Tensor& tensor, uint64_t since) {
            const std::byte* const data = memory_of(tensor);
            GilRelease release;
            return watch.is_unwritten(data, tensor.nbytes(), since);
          },
          py::arg("tensor"), py::arg("since"))
      .def(
          "forget",
          [](PageWatch& watch, uint64_t address, uint64_t since) {
            GilRelease release;
            watch.forget(reinterpret_cast<const std::byte*>(address), since);
          },
          py::arg("address"), py::arg("since"))
      .def("close",
           [](PageWatch& watch) {
             GilRelease release;
             watch.close();
           })
      .def_static("pinned", &PageWatch::pinned);
}

}  // namespace pyckpt
