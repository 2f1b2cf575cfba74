// What the files of the Python module pyckpt._C share: conversions, the GIL, exceptions; nothing
// else. pyckpt/_C.pyi documents the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "file.h"
#include "gil.h"

namespace pyckpt {

namespace py = pybind11;

Direct to_direct(const std::string& name);

// For a job that is used while it runs.
[[noreturn]] void throw_running();

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

// Keeps other threads of a Python without the GIL from changing an object, but where what runs
// within waits for something. So what is used of the object must be held as well.
class CriticalSection {
 public:
#ifdef Py_GIL_DISABLED
  explicit CriticalSection(PyObject* object) { PyCriticalSection_Begin(&section_, object); }
  ~CriticalSection() { PyCriticalSection_End(&section_); }
#else
  explicit CriticalSection(PyObject*) {}
  ~CriticalSection() {}  // not the default one: a variable of this type is not unused
#endif
  CriticalSection(const CriticalSection&) = delete;
  CriticalSection& operator=(const CriticalSection&) = delete;

#ifdef Py_GIL_DISABLED
 private:
  PyCriticalSection section_;
#endif
};

// An entry of a list; null behind its end, which other threads, and Python code that runs between
// two calls, may move.
inline py::object entry_of(PyObject* list, Py_ssize_t i) {
#ifdef Py_GIL_DISABLED
  PyObject* const entry = PyList_GetItemRef(list, i);
  if (entry == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(entry);
#else
  if (i >= PyList_GET_SIZE(list)) return py::object();
  return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(list, i));
#endif
}

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
  GilRelease release;
  function();
}

void register_engine(py::module_& module);
void register_envelope(py::module_& module);
void register_write_job(py::module_& module);
void register_read_job(py::module_& module);
void register_peer_job(py::module_& module);
void register_page_watch(py::module_& module);
void register_staging(py::module_& module);
void register_state_tree(py::module_& module);
void register_checks(py::module_& module);
void register_columns(py::module_& module);
void register_metadata(py::module_& module);
void register_plain_reads(py::module_& module);
void register_described(py::module_& module);
void register_plan(py::module_& module);
void register_timeline(py::module_& module);

}  // namespace pyckpt
