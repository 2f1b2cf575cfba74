// What the files of the Python module pyckpt._C share: conversions, the GIL, exceptions; nothing
// else. pyckpt/_C.pyi documents the module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#endif

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "file.h"
#include "stage_job.h"

namespace pyckpt {

namespace py = pybind11;

Direct to_direct(const std::string& name);

// A level of something nested that a function goes down by calling itself. Throws RecursionError,
// as Python does, where that is too deep: containers may be nested without end, or hold themselves.
class Level {
 public:
  Level() {
    if (Py_EnterRecursiveCall(" while looking into containers") != 0) {
      throw py::error_already_set();
    }
  }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;
  ~Level() { Py_LeaveRecursiveCall(); }
};

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

// Runs what may take long without the GIL, wherever it comes to be run: destructors may be the last
// of several, on any thread.
template <typename Function>
void without_gil(Function function) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    function();
    return;
  }
  py::gil_scoped_release release;
  function();
}

// Whether the tensor is memory and nothing more: its bytes, as they lie, are its values. Throws
// std::invalid_argument where the memory is not there.
bool is_plain(const at::Tensor& tensor);

// Leaves the calling thread's current CUDA device as it was, which a Device does not. Does nothing
// without CUDA, or where there are no devices.
class CurrentDevice {
 public:
  explicit CurrentDevice([[maybe_unused]] bool has_devices) {
#ifdef PYCKPT_CUDA
    c10::DeviceIndex index = 0;
    // Not in a forked child, which cannot use CUDA, nor where there is no driver.
    if (has_devices && c10::cuda::GetDevice(&index) == cudaSuccess) guard_.set_index(index);
#endif
  }

  // Whether the machine has devices at all.
  static bool is_any() {
#ifdef PYCKPT_CUDA
    return c10::cuda::device_count() > 0;
#else
    return false;
#endif
  }

#ifdef PYCKPT_CUDA
 private:
  // Sets the device back only where the process has a context on it, so that none is made.
  c10::cuda::OptionalCUDAGuard guard_;
#endif
};

// A device, and a stream there that the program gives its work to.
using Program = std::pair<std::shared_ptr<Device>, Stream>;

// The devices of some tensors, with the streams that were current as each was added.
class Programs {
 public:
  // The engine's device of a CUDA tensor.
  std::shared_ptr<Device> add(Engine& engine, const at::Tensor& tensor);

  // What the streams were given so far, copies made from now on see. Once a stream, however many
  // tensors there are. Without the GIL where a device is used for the first time.
  void follow();

  const std::vector<Program>& all() const { return all_; }

 private:
  std::vector<Program> all_;
  size_t followed_ = 0;  // the first ones
};

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
