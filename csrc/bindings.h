// What the files of the Python module pyckpt._C share: conversions, the GIL, exceptions; nothing
// else. pyckpt/_C.pyi documents the module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <string>

#include "engine.h"
#include "file.h"
#include "stage_job.h"

namespace pyckpt {

namespace py = pybind11;

Direct to_direct(const std::string& name);

// A buffer whose bytes lie one after another; throws BufferError where they do not.
class ContiguousBuffer {
 public:
  explicit ContiguousBuffer(const py::handle& object, int flags = PyBUF_SIMPLE)
      : view_(std::make_unique<Py_buffer>()) {
    if (PyObject_GetBuffer(object.ptr(), view_.get(), flags) != 0) {
      view_.reset();
      throw py::error_already_set();
    }
  }
  ContiguousBuffer(ContiguousBuffer&&) = default;
  ContiguousBuffer& operator=(ContiguousBuffer&&) = default;
  ~ContiguousBuffer() {
    if (view_) PyBuffer_Release(view_.get());
  }

  std::byte* data() const { return static_cast<std::byte*>(view_->buf); }
  size_t size() const { return static_cast<size_t>(view_->len); }

 private:
  std::unique_ptr<Py_buffer> view_;
};

// Whether the tensor is memory and nothing more: its bytes, as they lie, are its values. Throws
// std::invalid_argument where the memory is not there.
bool is_plain(const at::Tensor& tensor);

// The engine's device for a CUDA tensor, following the calling thread's current stream of that
// device: what the stream was given so far, copies made from now on see.
std::shared_ptr<Device> following_device(Engine& engine, int index);

// The copy that is the memory of a tensor handed out by a staging; null for other tensors.
std::shared_ptr<Staged> staged_of(const at::Tensor& tensor);

void register_engine(py::module_& module);
void register_envelope(py::module_& module);
void register_write_job(py::module_& module);
void register_read_job(py::module_& module);
void register_staging(py::module_& module);
void register_state_tree(py::module_& module);
void register_checks(py::module_& module);

}  // namespace pyckpt
