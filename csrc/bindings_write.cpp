// Jobs that make files, as Python sees them: with what keeps the memory alive that they read.
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_sources.h"
#include "bindings_tensor.h"
#include "envelope.h"
#include "gil.h"
#include "stream_job.h"
#include "write_job.h"

namespace pyckpt {

namespace {

// A FillJob, and what keeps alive the memory that it reads.
class PyFillJob {
 public:
  // Where an item lies, in bytes; as pyckpt.format.places unpacks it.
  struct Place {
    uint64_t offset;
    uint64_t length;
    uint64_t payload_offset;
    uint64_t payload_length;
    uint64_t crc32;
  };

  explicit PyFillJob(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  PyFillJob(const PyFillJob&) = delete;
  PyFillJob& operator=(const PyFillJob&) = delete;
  virtual ~PyFillJob() {
    if (job_ && job_->forked()) {
      new std::shared_ptr<FillJob>(std::move(job_));  // must not be destroyed here
      return;
    }
    abandon();
  }

  bool add_tensor(const at::Tensor& tensor, const std::shared_ptr<Envelope>& envelope) {
    Programs programs;
    return add_tensor(tensor, envelope, &programs);
  }

  // `programs`: those of tensors that were there already when the first of them was added.
  bool add_tensor(const at::Tensor& tensor, const std::shared_ptr<Envelope>& envelope,
                  Programs* programs) {
    if (!is_plain(tensor)) return false;
    const void* const memory = tensor.storage().data();
    Source source;
    source.data = static_cast<const std::byte*>(tensor.const_data_ptr());
    source.size = tensor.nbytes();
    if (source.size != envelope->payload_size) {
      throw std::invalid_argument("the envelope is for another number of bytes");
    }
    if (!tensor.is_non_overlapping_and_dense()) {
      if (!tensor.is_cpu()) return false;
      source.strided = std::make_shared<Strided>(tensor.sizes().vec(), tensor.strides().vec(),
                                                 tensor.element_size());
    }
    if (tensor.is_cuda()) {
      source.device = programs->add(*engine_, tensor);
      programs->follow();
    }
    source.staged = staged_of(tensor);
    Held held{tensor, nullptr, nullptr, {}};
    // Other threads may resize what is the program's own.
    if (tensor.is_cpu() && !source.staged && tensor.storage().resizable()) {
      held.memory = share_memory(tensor.storage());
      if (!held.memory) held.watched = memory;
      if (tensor.storage().data() != memory) throw_resized();  // since it was looked at above
    }
    held_.push_back(std::move(held));
    add(envelope, std::move(source));
    return true;
  }

  // Adds tensors from number `begin` up to the first that cannot be added; returns its number.
  size_t add_tensors(const py::list& tensors, const py::list& envelopes, size_t begin) {
    const size_t count = std::min(tensors.size(), envelopes.size());
    Programs programs;
    for (size_t i = begin; i < count; ++i) {
      // Kept: adding a tensor may let go of the GIL, and another thread change the list.
      const py::object tensor = tensors[i];
      const py::handle envelope = PyList_GET_ITEM(envelopes.ptr(), static_cast<py::ssize_t>(i));
      if (envelope.is_none() || !THPVariable_Check(tensor.ptr())) return i;
      if (!add_tensor(THPVariable_Unpack(tensor.ptr()), envelope.cast<std::shared_ptr<Envelope>>(),
                      &programs)) {
        return i;
      }
    }
    return count;
  }

  void add_bytes(const py::object& object) {
    ContiguousBuffer view(object);
    Source source;
    source.data = view.data();
    source.size = view.size();
    held_.emplace_back();
    held_.back().buffers.push_back(std::move(view));
    add(nullptr, std::move(source));
  }

  // One Place an item.
  py::bytes finish() {
    {
      GilRelease release;
      job_->finish();
    }
    for (const Held& held : held_) held.check();
    held_.clear();
    std::string places;
    places.reserve(job_->items().size() * sizeof(Place));
    for (const Item& item : job_->items()) {
      const Place place{item.offset, item.length, item.payload_offset, item.source.size,
                        item.crc.load()};
      places.append(reinterpret_cast<const char*>(&place), sizeof(place));
    }
    return places;
  }

  void abandon() {
    {
      GilRelease release;
      if (job_) job_->abandon();
    }
    held_.clear();
  }

  WriteStatistics statistics() const { return job_->statistics(); }

 protected:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<FillJob> job_;

 private:
  struct Held {
    at::Tensor tensor;
    std::shared_ptr<const void> memory;     // of a storage that may be given other memory
    const void* watched = nullptr;          // the same, where it could not be kept
    std::vector<ContiguousBuffer> buffers;  // one or none

    void check() const {
      if (watched != nullptr && tensor.storage().data() != watched) throw_resized();
    }
  };

  void add(std::shared_ptr<const Envelope> envelope, Source source) {
    // Adding takes less time than handing the GIL over and back would; waiting is another matter.
    if (!job_->add(std::move(envelope), std::move(source))) {
      GilRelease release;
      job_->wait_for_room();
    }
    for (const size_t consumed = job_->consumed(); released_ < consumed; ++released_) {
      held_.front().check();
      held_.pop_front();
    }
  }

  std::deque<Held> held_;  // of the items from number released_ on
  size_t released_ = 0;
};

class PyWriteJob : public PyFillJob {
 public:
  PyWriteJob(std::shared_ptr<Engine> engine, const std::string& path, const std::string& direct,
             bool sync, uint64_t preallocate)
      : PyFillJob(std::move(engine)) {
    WriteOptions options{to_direct(direct), sync, preallocate};
    GilRelease release;
    job_ = engine_->start_write(path, options);
  }
};

class PyStreamJob : public PyFillJob {
 public:
  explicit PyStreamJob(std::shared_ptr<Engine> engine) : PyFillJob(std::move(engine)) {
    stream_ = engine_->start_stream();
    job_ = stream_;
  }

  // The next window's bytes; none at the end. A second thread calls it while the feeder adds, so it
  // holds the job by itself.
  py::bytes take() {
    const std::shared_ptr<StreamJob> stream = stream_;
    size_t size = 0;
    {
      GilRelease release;
      size = stream->next_size();
    }
    auto bytes = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(size)));
    if (!bytes) throw py::error_already_set();
    if (size == 0) return bytes;
    auto* const to = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
    GilRelease release;
    stream->take(to);
    return bytes;
  }

  // Fails the job, from any thread.
  void fail(const std::string& why) {
    GilRelease release;
    job_->fail(std::make_exception_ptr(std::runtime_error(why)));
  }

 private:
  std::shared_ptr<StreamJob> stream_;
};

}  // namespace

void register_write_job(py::module_& module) {
  py::class_<WriteStatistics>(module, "WriteStatistics")
      .def_readonly("items", &WriteStatistics::items)
      .def_readonly("bytes_added", &WriteStatistics::bytes_added)
      .def_readonly("bytes_written", &WriteStatistics::bytes_written)
      .def_readonly("seconds", &WriteStatistics::seconds)
      .def_readonly("copy_seconds", &WriteStatistics::copy_seconds)
      .def_readonly("checksum_seconds", &WriteStatistics::checksum_seconds)
      .def_readonly("write_seconds", &WriteStatistics::write_seconds)
      .def_readonly("sync_seconds", &WriteStatistics::sync_seconds)
      .def_readonly("slot_waits", &WriteStatistics::slot_waits)
      .def_readonly("direct", &WriteStatistics::direct)
      .def_readonly("fallback_reason", &WriteStatistics::fallback_reason);
  py::class_<PyFillJob>(module, "FillJob")
      .def("add_tensors", &PyFillJob::add_tensors, py::arg("tensors"), py::arg("envelopes"),
           py::arg("begin") = 0)
      .def("add_tensor",
           py::overload_cast<const at::Tensor&, const std::shared_ptr<Envelope>&>(
               &PyFillJob::add_tensor),
           py::arg("tensor"), py::arg("envelope").none(false))
      .def("add_bytes", &PyFillJob::add_bytes, py::arg("buffer"))
      .def("finish", &PyFillJob::finish)
      .def("abandon", &PyFillJob::abandon)
      .def("statistics", &PyFillJob::statistics);
  py::class_<PyWriteJob, PyFillJob>(module, "WriteJob")
      .def(
          py::init([](std::shared_ptr<Engine> engine, const std::string& path,
                      const std::string& direct, bool sync, uint64_t preallocate) {
            return std::make_unique<PyWriteJob>(std::move(engine), path, direct, sync, preallocate);
          }),
          py::arg("engine").none(false), py::arg("path"), py::kw_only(), py::arg("direct") = "auto",
          py::arg("sync") = true, py::arg("preallocate") = 0);
  py::class_<PyStreamJob, PyFillJob>(module, "StreamJob")
      .def(py::init([](std::shared_ptr<Engine> engine) {
             return std::make_unique<PyStreamJob>(std::move(engine));
           }),
           py::arg("engine").none(false))
      .def("take", &PyStreamJob::take)
      .def("fail", &PyStreamJob::fail, py::arg("why"));
}

}  // namespace pyckpt
