// The Python module pyckpt._C: conversions, the GIL, exceptions; nothing else. pyckpt/_C.pyi
// documents it.
#include "bindings.h"

#include <torch/version.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings_tensor.h"
#include "crc32.h"
#include "envelope.h"
#include "error.h"
#include "sizes.h"

namespace pyckpt {

Direct to_direct(const std::string& name) {
  if (name == "auto") return Direct::kAuto;
  if (name == "require") return Direct::kRequire;
  if (name == "off") return Direct::kOff;
  throw std::invalid_argument("direct must be 'auto', 'require' or 'off', not '" + name + "'");
}

void throw_running() { throw std::runtime_error("the job runs, in another thread"); }

namespace {

uint32_t crc32_of(const py::object& buffer, uint32_t crc) {
  const ContiguousBuffer view(buffer);
  GilRelease release;
  return crc32(crc, view.data(), view.size());
}

std::shared_ptr<Envelope> make_envelope(std::string prefix, std::string suffix,
                                        uint64_t payload_size, std::vector<uint32_t> crc_positions,
                                        uint32_t id_position, uint32_t id_size,
                                        uint32_t id_hash_position,
                                        std::vector<uint32_t> id_crc_positions,
                                        std::vector<uint32_t> crcs_before,
                                        std::vector<uint32_t> crcs_after) {
  auto envelope = std::make_shared<Envelope>();
  envelope->prefix = std::move(prefix);
  envelope->suffix = std::move(suffix);
  envelope->payload_size = payload_size;
  envelope->crc_positions = std::move(crc_positions);
  envelope->id_position = id_position;
  envelope->id_size = id_size;
  envelope->id_hash_position = id_hash_position;
  envelope->id_crc_positions = std::move(id_crc_positions);
  envelope->crcs_before = std::move(crcs_before);
  envelope->crcs_after = std::move(crcs_after);
  envelope->check();
  return envelope;
}

py::bytes stamped_suffix(const Envelope& envelope, uint32_t crc) {
  std::string suffix = envelope.suffix;
  envelope.stamp(crc, suffix.data());
  return suffix;
}

// Names of files are bytes, not always text.
py::object decode_path(const std::string& path) {
  PyObject* decoded =
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(decoded);
}

void translate_exception(std::exception_ptr pointer) {
  const auto raise = [](const char* name, const char* message) {
    const py::object type = py::module_::import("pyckpt.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
  };
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    // OSError picks the subclass (FileNotFoundError, ...) from the number.
    const py::object path = error.path().empty() ? py::none() : decode_path(error.path());
    const py::object exception =
        py::handle(PyExc_OSError)(error.error_number(), error.message(), path);
    PyErr_SetObject(PyExc_OSError, exception.ptr());
  } catch (const std::system_error& error) {  // a thread that could not be started
    const py::object exception = py::handle(PyExc_OSError)(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, exception.ptr());
  } catch (const EngineClosed& error) {
    raise("EngineClosed", error.what());
  } catch (const CudaError& error) {
    raise("CudaError", error.what());
  }
}

// Joins threads, and takes memory from CUDA and gives it back to the system.
void delete_engine(Engine* engine) {
  without_gil([engine] {
    const CurrentDevice current_device(engine->uses_devices());
    delete engine;
  });
}

void prewarm(Engine& engine, size_t bytes, bool shared, const std::vector<int>& devices,
             bool background) {
  const auto kind = shared ? Arena::Kind::kShared : Arena::Kind::kPrivate;
  const CurrentDevice current_device(!devices.empty());
  GilRelease release;
  if (background) {
    engine.prewarm_later(bytes, kind, devices);
  } else {
    engine.prewarm(bytes, kind, devices);
  }
}

// Memory that is not an engine's: other than torch's own binding of the runtime, these leave no
// error behind for the program's next call, nor end a capture, nor change the current device.
void register_memory([[maybe_unused]] int device, [[maybe_unused]] uintptr_t address,
                     [[maybe_unused]] size_t size) {
#ifdef PYCKPT_CUDA
  const CurrentDevice current_device(true);
  GilRelease release;
  register_host_memory(device, reinterpret_cast<void*>(address), size);
#else
  throw CudaError("pyckpt was built without CUDA");
#endif
}

void unregister_memory([[maybe_unused]] int device, [[maybe_unused]] uintptr_t address,
                       [[maybe_unused]] uintptr_t stream) {
#ifdef PYCKPT_CUDA
  const CurrentDevice current_device(true);
  GilRelease release;
  unregister_host_memory_after(device, reinterpret_cast<Stream>(stream),
                               reinterpret_cast<void*>(address));
#else
  throw CudaError("pyckpt was built without CUDA");
#endif
}

}  // namespace

void register_engine(py::module_& module) {
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](size_t slot_bytes, size_t slots, size_t io_threads, size_t arena_bytes) {
             return std::shared_ptr<Engine>(
                 new Engine({slot_bytes, slots, io_threads, arena_bytes}), &delete_engine);
           }),
           py::kw_only(), py::arg("slot_bytes"), py::arg("slots"), py::arg("io_threads"),
           py::arg("arena_bytes"))
      .def("close", &Engine::close, py::call_guard<GilRelease>())
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("arena_max_bytes",
                             [](Engine& engine) { return engine.arena().max_bytes(); })
      .def_property_readonly("arena_held_bytes",
                             [](Engine& engine) { return engine.arena().held_bytes(); })
      .def_property_readonly("arena_used_bytes",
                             [](Engine& engine) { return engine.arena().used_bytes(); })
      .def("prewarm", &prewarm, py::arg("bytes"), py::kw_only(), py::arg("shared"),
           py::arg("devices"), py::arg("background") = false)
      .def("wait_prewarmed", &Engine::wait_prewarmed, py::call_guard<GilRelease>());
  module.def("register_host_memory", &register_memory, py::arg("device"), py::arg("address"),
             py::arg("size"));
  module.def("unregister_host_memory", &unregister_memory, py::arg("device"), py::arg("address"),
             py::arg("stream"));
}

void register_envelope(py::module_& module) {
  py::class_<Envelope, std::shared_ptr<Envelope>>(module, "Envelope")
      .def(py::init(&make_envelope), py::kw_only(), py::arg("prefix"), py::arg("suffix"),
           py::arg("payload_size"), py::arg("crc_positions"), py::arg("id_position") = 0,
           py::arg("id_size") = 0, py::arg("id_hash_position") = 0,
           py::arg("id_crc_positions") = std::vector<uint32_t>(),
           py::arg("crcs_before") = std::vector<uint32_t>(),
           py::arg("crcs_after") = std::vector<uint32_t>())
      .def_property_readonly("prefix",
                             [](const Envelope& envelope) { return py::bytes(envelope.prefix); })
      .def_readonly("payload_size", &Envelope::payload_size)
      .def("suffix", &stamped_suffix, py::arg("crc"));
}

}  // namespace pyckpt

PYBIND11_MODULE(_C, module, pybind11::mod_gil_not_used()) {
  namespace py = pybind11;
  py::register_exception_translator(&pyckpt::translate_exception);
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("page_bytes") = pyckpt::kPage;
  module.attr("aligned_payload_min_bytes") = pyckpt::kAlignedPayloadMin;
  module.attr("small_source_bytes") = pyckpt::kSmallSource;
  module.attr("small_alignment_bytes") = pyckpt::kSmallAlignment;
#ifdef PYCKPT_CUDA
  module.attr("cuda") = true;
#else
  module.attr("cuda") = false;
#endif
  module.def("crc32", &pyckpt::crc32_of, py::arg("buffer"), py::arg("crc") = 0);
  module.def("crc32_shift", &pyckpt::crc32_shift, py::arg("crc"), py::arg("size"));
  pyckpt::register_envelope(module);
  pyckpt::register_engine(module);
  pyckpt::register_write_job(module);
  pyckpt::register_read_job(module);
  pyckpt::register_peer_job(module);
  pyckpt::register_page_watch(module);
  pyckpt::register_staging(module);
  pyckpt::register_state_tree(module);
  pyckpt::register_checks(module);
  pyckpt::register_columns(module);
  pyckpt::register_metadata(module);
  pyckpt::register_plain_reads(module);
  pyckpt::register_described(module);
  pyckpt::register_plan(module);
  pyckpt::register_timeline(module);
}
