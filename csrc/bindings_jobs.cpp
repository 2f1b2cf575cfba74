// Jobs, as Python sees them: with what keeps the memory alive that they read and write.
#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "envelope.h"
#include "error.h"
#include "read_job.h"
#include "write_job.h"

namespace pyckpt {

Direct to_direct(const std::string& name) {
  if (name == "auto") return Direct::kAuto;
  if (name == "require") return Direct::kRequire;
  if (name == "off") return Direct::kOff;
  throw std::invalid_argument("direct must be 'auto', 'require' or 'off', not '" + name + "'");
}

// Whether the tensor is memory and nothing more: its bytes, as they lie, are its values. Throws
// std::invalid_argument where the memory is not there.
bool is_plain(const at::Tensor& tensor) {
  // Subclasses may be made of other tensors, and have no memory behind what they say of themselves.
  if (tensor.key_set().has(c10::DispatchKey::Python)) return false;
  const at::Device device = tensor.device();
  if (!device.is_cpu() && !device.is_cuda()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_conj() ||
      tensor.is_neg() || !tensor.has_storage()) {
    return false;
  }
  uint64_t end = tensor.numel() == 0 ? 0 : 1;  // in elements, from the tensor's first
  for (int64_t d = 0; end != 0 && d < tensor.dim(); ++d) {
    end += static_cast<uint64_t>(tensor.size(d) - 1) * static_cast<uint64_t>(tensor.stride(d));
  }
  if (end != 0) end += static_cast<uint64_t>(tensor.storage_offset());
  if (end * tensor.element_size() > tensor.storage().nbytes()) {
    throw std::invalid_argument(
        "the tensor is larger than its storage: its memory was freed (resize_(0)?)");
  }
  return true;
}

std::shared_ptr<Device> Programs::add(Engine& engine, const at::Tensor& tensor) {
  Stream stream = nullptr;
#ifdef PYCKPT_CUDA
  stream =
      c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(tensor.get_device())).stream();
#endif
  const auto same = [&](const Program& program) {
    return program.first->index() == tensor.get_device() && program.second == stream;
  };
  const auto found = std::find_if(all_.begin(), all_.end(), same);
  if (found != all_.end()) return found->first;
  all_.emplace_back(engine.cuda_device(static_cast<int>(tensor.get_device())), stream);
  return all_.back().first;
}

void Programs::follow() {
  if (followed_ == all_.size()) return;
  const CurrentDevice current_device(true);
  for (; followed_ < all_.size(); ++followed_) {
    const auto& [device, stream] = all_[followed_];
    std::optional<py::gil_scoped_release> release;
    if (!device->is_ready()) release.emplace();
    device->follow(stream);
  }
}

namespace {

// A WriteJob, and what keeps alive the memory that it reads.
class PyWriteJob {
 public:
  // Where an item lies, in bytes; as pyckpt.format.places unpacks it.
  struct Place {
    uint64_t offset;
    uint64_t length;
    uint64_t payload_offset;
    uint64_t payload_length;
    uint64_t crc32;
  };

  PyWriteJob(std::shared_ptr<Engine> engine, const std::string& path, const std::string& direct,
             bool sync, uint64_t preallocate)
      : engine_(std::move(engine)) {
    WriteOptions options{to_direct(direct), sync, preallocate};
    py::gil_scoped_release release;
    job_ = engine_->start_write(path, options);
  }
  PyWriteJob(const PyWriteJob&) = delete;
  PyWriteJob& operator=(const PyWriteJob&) = delete;
  ~PyWriteJob() {
    if (job_ && job_->forked()) {
      new std::shared_ptr<WriteJob>(std::move(job_));  // must not be destroyed here
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
    held_.push_back({tensor, {}});
    add(envelope, std::move(source));
    return true;
  }

  // Adds tensors from number `begin` up to the first that cannot be added; returns its number.
  size_t add_tensors(const py::list& tensors, const py::list& envelopes, size_t begin) {
    const size_t count = std::min(tensors.size(), envelopes.size());
    Programs programs;
    for (size_t i = begin; i < count; ++i) {
      const py::handle tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<py::ssize_t>(i));
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
    held_.push_back({at::Tensor(), {}});
    held_.back().buffers.push_back(std::move(view));
    add(nullptr, std::move(source));
  }

  // One Place an item.
  py::bytes finish() {
    {
      py::gil_scoped_release release;
      job_->finish();
    }
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
      py::gil_scoped_release release;
      if (job_) job_->abandon();
    }
    held_.clear();
  }

  WriteStatistics statistics() const { return job_->statistics(); }

 private:
  struct Held {
    at::Tensor tensor;
    std::vector<ContiguousBuffer> buffers;  // one or none
  };

  void add(std::shared_ptr<const Envelope> envelope, Source source) {
    // Adding takes less time than handing the GIL over and back would; waiting is another matter.
    if (!job_->add(std::move(envelope), std::move(source))) {
      py::gil_scoped_release release;
      job_->wait_for_room();
    }
    for (const size_t consumed = job_->consumed(); released_ < consumed; ++released_) {
      held_.pop_front();
    }
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<WriteJob> job_;
  std::deque<Held> held_;  // of the items from number released_ on
  size_t released_ = 0;
};

// A ReadJob, and what keeps alive the memory that it fills.
class PyReadJob {
 public:
  PyReadJob(std::shared_ptr<Engine> engine, const std::string& direct, bool checksum)
      : engine_(std::move(engine)), job_(engine_->make_read(to_direct(direct), checksum)) {}

  size_t add_file(const std::string& path) {
    check_idle();
    py::gil_scoped_release release;
    const size_t file = job_->add_file(path);
    files_ = file + 1;
    return file;
  }

  // Returns the number of the range, or -1 where the box takes several; none where the tensor
  // cannot be filled.
  std::optional<int64_t> add_tensor(size_t file, uint64_t offset, const at::Tensor& tensor,
                                    const std::optional<std::vector<int64_t>>& file_stride) {
    if (!is_plain(tensor)) return std::nullopt;
    if (!file_stride && tensor.is_contiguous()) {
      check_place(file, offset, tensor.nbytes());
      Destination destination;
      if (tensor.numel() != 0) {
        destination.data = static_cast<std::byte*>(tensor.mutable_data_ptr());
        if (tensor.is_cuda()) destination.device = programs_.add(*engine_, tensor);
      }
      tensors_.emplace_back(tensor, tensor.const_data_ptr());
      return static_cast<int64_t>(job_->add(file, offset, tensor.nbytes(), std::move(destination)));
    }
    const auto strided =
        std::make_shared<Strided>(box_of(tensor, file_stride), tensor.element_size());
    check_place(file, offset, strided->file_bytes());
    Destination destination;
    destination.data = static_cast<std::byte*>(tensor.mutable_data_ptr());
    if (tensor.is_cuda()) {
      if (!strided->dense()) return std::nullopt;
      destination.device = programs_.add(*engine_, tensor);
    }
    tensors_.emplace_back(tensor, tensor.const_data_ptr());
    if (tensor.numel() == 0) return static_cast<int64_t>(job_->add(file, offset, 0, {}));
    if (strided->dense()) {
      return static_cast<int64_t>(job_->add(file, offset, tensor.nbytes(), destination));
    }
    std::vector<Strided::Place> places;
    destination.strided = strided->split(kMergeGap, &places);
    const uint64_t size = destination.strided->file_bytes();
    std::byte* const base = destination.data;
    int64_t range = -1;
    for (const Strided::Place& place : places) {
      destination.data = base + place.memory_offset;
      range = static_cast<int64_t>(job_->add(file, offset + place.file_offset, size, destination));
    }
    return places.size() == 1 ? range : -1;
  }

  std::vector<std::optional<int64_t>> add_tensors(const py::list& files, const py::list& offsets,
                                                  const py::list& tensors) {
    if (files.size() != tensors.size() || offsets.size() != tensors.size()) {
      throw std::invalid_argument("each of the tensors must have a file and an offset");
    }
    std::vector<std::optional<int64_t>> ranges;
    ranges.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      // Held, since a conversion may run Python, which may change the list.
      const py::object tensor = tensors[i];
      if (!THPVariable_Check(tensor.ptr())) throw py::type_error("tensors must be tensors");
      ranges.push_back(add_tensor(files[i].cast<size_t>(), offsets[i].cast<uint64_t>(),
                                  THPVariable_Unpack(tensor.ptr()), std::nullopt));
    }
    return ranges;
  }

  int64_t add_buffer(size_t file, uint64_t offset, const py::object& buffer) {
    buffers_.emplace_back(buffer, PyBUF_WRITABLE);
    const ContiguousBuffer& view = buffers_.back();
    check_place(file, offset, view.size());
    return static_cast<int64_t>(
        job_->add(file, offset, view.size(), {view.data(), nullptr, nullptr}));
  }

  std::vector<uint32_t> run() {
    if (job_->forked()) throw EngineClosed("the job was made in another process, before a fork");
    check_idle();
    for (const auto& [tensor, memory] : tensors_) {
      // Its storage was resized since it was added, perhaps.
      if (!is_plain(tensor) || tensor.const_data_ptr() != memory) {
        throw std::invalid_argument("the memory of a tensor that is to be read was freed or moved");
      }
    }
    // The job is through with them, whether it comes to its end or throws.
    const auto tensors = std::move(tensors_);
    const auto buffers = std::move(buffers_);
    files_ = 0;
    running_ = true;
    const auto done = [this](const void*) { running_ = false; };
    const std::unique_ptr<const void, decltype(done)> ends(this, done);
    programs_.follow();
    const CurrentDevice current_device(!programs_.all().empty());
    py::gil_scoped_release release;
    return job_->run();
  }

  ReadStatistics statistics() const { return job_->statistics(); }

 private:
  static constexpr uint64_t kFileMax = std::numeric_limits<int64_t>::max();

  // Threads that read look at what there is without a lock.
  void check_idle() const {
    if (running_) throw std::runtime_error("the job runs, in another thread");
  }

  void check_place(size_t file, uint64_t offset, uint64_t size) const {
    check_idle();
    if (file >= files_) throw std::invalid_argument("there is no file of this number");
    if (size > kFileMax || offset > kFileMax - size) {
      throw std::invalid_argument("the bytes would lie beyond the end of any file");
    }
  }

  static std::vector<Strided::Dimension> box_of(
      const at::Tensor& tensor, const std::optional<std::vector<int64_t>>& file_stride) {
    const auto dim = static_cast<size_t>(tensor.dim());
    if (file_stride && file_stride->size() != dim) {
      throw std::invalid_argument("file_stride must have as many entries as the tensor dimensions");
    }
    const uint64_t item_size = tensor.element_size();
    std::vector<Strided::Dimension> box(dim);
    uint64_t span = item_size;  // in the file, of the dimensions further in
    for (size_t d = dim; d-- > 0;) {
      const auto i = static_cast<int64_t>(d);
      box[d].size = static_cast<uint64_t>(tensor.size(i));
      box[d].memory_stride = static_cast<uint64_t>(tensor.stride(i)) * item_size;
      box[d].file_stride = span;
      if (file_stride && box[d].size > 1) {
        const int64_t stride = (*file_stride)[d];
        if (stride <= 0 || static_cast<uint64_t>(stride) > kFileMax / item_size ||
            static_cast<uint64_t>(stride) * item_size < span) {
          throw std::invalid_argument("each of file_stride must be as long as what is further in");
        }
        box[d].file_stride = static_cast<uint64_t>(stride) * item_size;
      }
      uint64_t before = 0;
      if (box[d].size > 0 &&
          (__builtin_mul_overflow(box[d].size - 1, box[d].file_stride, &before) ||
           __builtin_add_overflow(before, span, &span) || span > kFileMax)) {
        throw std::invalid_argument("file_stride reaches beyond the end of any file");
      }
    }
    return box;
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<ReadJob> job_;
  std::atomic<size_t> files_{0};
  std::atomic<bool> running_{false};
  Programs programs_;
  std::vector<std::pair<at::Tensor, const void*>> tensors_;  // and where their memory was
  std::vector<ContiguousBuffer> buffers_;
};

}  // namespace

void register_read_job(py::module_& module) {
  py::class_<ReadStatistics>(module, "ReadStatistics")
      .def_readonly("ranges", &ReadStatistics::ranges)
      .def_readonly("bytes_needed", &ReadStatistics::bytes_needed)
      .def_readonly("bytes_read", &ReadStatistics::bytes_read)
      .def_readonly("seconds", &ReadStatistics::seconds)
      .def_readonly("copy_seconds", &ReadStatistics::copy_seconds)
      .def_readonly("checksum_seconds", &ReadStatistics::checksum_seconds)
      .def_readonly("read_seconds", &ReadStatistics::read_seconds)
      .def_readonly("slot_waits", &ReadStatistics::slot_waits)
      .def_readonly("direct", &ReadStatistics::direct)
      .def_readonly("fallback_reason", &ReadStatistics::fallback_reason);
  py::class_<PyReadJob>(module, "ReadJob")
      .def(py::init([](std::shared_ptr<Engine> engine, const std::string& direct, bool checksum) {
             return std::make_unique<PyReadJob>(std::move(engine), direct, checksum);
           }),
           py::arg("engine"), py::kw_only(), py::arg("direct") = "auto", py::arg("checksum") = true)
      .def("add_file", &PyReadJob::add_file, py::arg("path"))
      .def("add_tensor", &PyReadJob::add_tensor, py::arg("file"), py::arg("offset"),
           py::arg("tensor"), py::arg("file_stride") = std::nullopt)
      .def("add_tensors", &PyReadJob::add_tensors, py::arg("files"), py::arg("offsets"),
           py::arg("tensors"))
      .def("add_buffer", &PyReadJob::add_buffer, py::arg("file"), py::arg("offset"),
           py::arg("buffer"))
      .def("run", &PyReadJob::run)
      .def("statistics", &PyReadJob::statistics);
}

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
  py::class_<PyWriteJob>(module, "WriteJob")
      .def(py::init([](std::shared_ptr<Engine> engine, const std::string& path,
                       const std::string& direct, bool sync, uint64_t preallocate) {
             return std::make_unique<PyWriteJob>(std::move(engine), path, direct, sync,
                                                 preallocate);
           }),
           py::arg("engine"), py::arg("path"), py::kw_only(), py::arg("direct") = "auto",
           py::arg("sync") = true, py::arg("preallocate") = 0)
      .def("add_tensors", &PyWriteJob::add_tensors, py::arg("tensors"), py::arg("envelopes"),
           py::arg("begin") = 0)
      .def("add_tensor",
           py::overload_cast<const at::Tensor&, const std::shared_ptr<Envelope>&>(
               &PyWriteJob::add_tensor),
           py::arg("tensor"), py::arg("envelope"))
      .def("add_bytes", &PyWriteJob::add_bytes, py::arg("buffer"))
      .def("finish", &PyWriteJob::finish)
      .def("abandon", &PyWriteJob::abandon)
      .def("statistics", &PyWriteJob::statistics);
}

}  // namespace pyckpt
