// Recordings of what threads did, as Python sees them.
#include "bindings.h"
#include "timeline.h"

namespace pyckpt {
namespace {

// The kernel cuts names, perhaps inside of a character.
py::str decode_name(const std::string& name) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

py::list stop() {
  std::vector<TimelineTrack> tracks;
  {
    GilRelease release;
    tracks = Timeline::stop();
  }
  py::list result;
  for (const TimelineTrack& track : tracks) {
    py::list spans;
    for (const TimelineSpan& span : track.spans) {
      spans.append(py::make_tuple(span.name, span.begin_ns, span.end_ns, span.bytes));
    }
    result.append(py::make_tuple(track.thread, decode_name(track.name), spans, track.dropped));
  }
  return result;
}

}  // namespace

void register_timeline(py::module_& module) {
  module.def("start_timeline", &Timeline::start);
  module.def("stop_timeline", &stop);
}

}  // namespace pyckpt
