// Staging, as Python sees it: tensors in, tensors on the way to host memory out.
#include <ATen/ATen.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_sources.h"
#include "bindings_tensor.h"
#include "stage_job.h"

namespace pyckpt {
namespace {

// Storages of tensors that only a guarded optimizer writes to.
class StorageSet {
 public:
  // Takes in the tensors found in nested dicts, lists and tuples.
  void add(const py::handle& object) { walk(object.ptr()); }

  bool contains(const at::Tensor& tensor) const {
    return storages_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
  }
  size_t size() const { return storages_.size(); }

 private:
  void walk(PyObject* object) {
    if (THPVariable_Check(object)) {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.key_set().has(c10::DispatchKey::Python)) {
        if (tensor.has_storage()) storages_.insert(tensor.storage().unsafeGetStorageImpl());
      } else if (const auto local = py::reinterpret_steal<py::object>(
                     PyObject_GetAttrString(object, "_local_tensor"))) {
        // A DTensor; an optimizer writes to the part that is here.
        const Level level;
        walk(local.ptr());
      } else {
        PyErr_Clear();  // some other kind of tensor, of which we know nothing
      }
    } else if (PyDict_Check(object)) {
      const Level level;
      const CriticalSection section(object);
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(object, &position, &key, &value) != 0) {
        walk(py::reinterpret_borrow<py::object>(value).ptr());
      }
    } else if (PyList_Check(object)) {
      const Level level;
      py::object entry;
      for (Py_ssize_t i = 0; (entry = entry_of(object, i)); ++i) walk(entry.ptr());
    } else if (PyTuple_Check(object)) {
      const Level level;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) walk(PyTuple_GET_ITEM(object, i));
    }
  }

  std::unordered_set<const c10::StorageImpl*> storages_;
};

void delete_staged(void* context) {
  auto* const staged = static_cast<std::shared_ptr<Staged>*>(context);
  const std::shared_ptr<Region>& region = (*staged)->region();
  // Handing the GIL over and back would take longer than most of these.
  if (region && staged->use_count() == 1 && region->is_last_of_arena()) {
    without_gil([staged, &region] {
      // Of a program that saves from the host alone, CUDA is not asked anything: that would keep
      // the program's forked children from using it.
      const CurrentDevice current_device(region->arena_uses_device());
      delete staged;
    });
  } else {
    delete staged;
  }
}

// A tensor whose memory is the copy. Tensors that cover their memory keep their strides.
at::Tensor make_staged_tensor(const std::shared_ptr<Staged>& staged, const at::Tensor& like,
                              bool keeps_strides) {
  auto maker = at::for_blob(staged->data(), like.sizes());
  if (keeps_strides) maker.strides(like.strides());
  return maker.context(new std::shared_ptr<Staged>(staged), &delete_staged)
      .options(at::TensorOptions().dtype(like.dtype()).device(at::kCPU))
      .make_tensor();
}

// A StageJob, and what keeps alive the memory that it reads.
class PyStaging {
 public:
  explicit PyStaging(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  // Once. On an error there is nothing to be done but to let go of this.
  void start(const py::list& leaves, const StorageSet* guarded,
             const std::optional<std::string>& wanted, bool shared) {
    std::vector<StageSource> sources(leaves.size());
    std::vector<at::Tensor> tensors(leaves.size());
    StageJob::Options options;
    options.kind = shared ? Arena::Kind::kShared : Arena::Kind::kPrivate;
    tensors_ = py::list(leaves.size());
    for (size_t i = 0; i < leaves.size(); ++i) {
      const py::object leaf = leaves[i];
      if (!THPVariable_Check(leaf.ptr()) || !is_plain(THPVariable_Unpack(leaf.ptr()))) {
        tensors_[i] = py::none();
        continue;
      }
      at::Tensor tensor = THPVariable_Unpack(leaf.ptr());
      const bool unwanted = wanted && i < wanted->size() && (*wanted)[i] == 0;
      if (unwanted || tensor.numel() == 0) {
        const auto device = unwanted ? at::kMeta : at::kCPU;
        const auto like = tensor.options().device(device).pinned_memory(false);
        // With the strides that its copy would have.
        tensors_[i] = tensor.is_non_overlapping_and_dense()
                          ? at::empty_strided(tensor.sizes(), tensor.strides(), like)
                          : at::empty(tensor.sizes(), like);
        continue;
      }
      StageSource& source = sources[i];
      source.guarded = guarded != nullptr && guarded->contains(tensor);
      if (!tensor.is_non_overlapping_and_dense()) {
        if (tensor.is_cuda()) {
          // On the caller's stream, which ours will follow: of the tensor itself nothing is read
          // after that, and the memory is not bound to a stream that goes with the engine. Without
          // the GIL, since the driver may make the thread wait.
          const GilRelease release;
          tensor = tensor.detach().contiguous();
        } else {
          source.strided = std::make_shared<Strided>(tensor.sizes().vec(), tensor.strides().vec(),
                                                     tensor.element_size());
        }
      }
      source.data = static_cast<const std::byte*>(tensor.const_data_ptr());
      source.size = tensor.nbytes();
      tensors[i] = std::move(tensor);
    }
    Programs programs;
    const auto kept = std::make_shared<Sources>();
    for (size_t i = 0; i < sources.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      if (!tensor.defined()) continue;
      if (tensor.is_cuda()) sources[i].device = programs.add(*engine_, tensor);
      kept->add(tensor, sources[i].device, /*resizable=*/sources[i].guarded);
      // Without the GIL, another thread may have come between.
      if (sources[i].guarded && tensor.const_data_ptr() != sources[i].data) throw_resized();
    }
    programs.follow();
    programs_ = programs.all();
    options.programs = programs_;
    if (!programs_.empty()) options.pin_device = programs_.front().first->index();
    options.sources = kept;
    sources_ = kept;
    {
      const CurrentDevice current_device(!programs_.empty());
      GilRelease release;
      job_ = engine_->start_stage(sources, std::move(options));
      job_->wait_volatile();
    }
    // What found no room is read until the save is over.
    if (job_->statistics().bytes_streamed > 0) streamed_ = kept;
    hand_out(leaves, sources, tensors);
  }
  PyStaging(const PyStaging&) = delete;
  PyStaging& operator=(const PyStaging&) = delete;
  ~PyStaging() {
    if (!job_) return;
    if (job_->forked()) {
      new std::shared_ptr<StageJob>(std::move(job_));  // must not be destroyed here
      return;
    }
    const CurrentDevice current_device(!programs_.empty());
    GilRelease release;
    job_.reset();
  }

  // Their memory then lives as long as they do, or until `release`.
  py::list take_tensors() { return std::exchange(tensors_, py::list()); }
  uint64_t streamed_volatile_bytes() const { return streamed_volatile_bytes_; }
  StageStatistics statistics() const { return job_->statistics(); }

  void wait() {
    {
      const CurrentDevice current_device(!programs_.empty());
      GilRelease release;
      job_->wait();
    }
    check();
  }

  // What the calling thread's current streams are given from now on waits for the copies. Whatever
  // goes wrong here fails the job first, since the caller may go on.
  void guard() {
    try {
      const CurrentDevice current_device(!programs_.empty());
      GilRelease release;
      job_->wait_host();
#ifdef PYCKPT_CUDA
      for (const auto& [device, before] : programs_) {
        const auto index = static_cast<c10::DeviceIndex>(device->index());
        job_->hold(device, c10::cuda::getCurrentCUDAStream(index).stream());
      }
#endif
    } catch (...) {
      job_->fail(std::current_exception());
      throw;
    }
  }

  // For what goes wrong on the way to `guard`.
  void fail(const std::string& reason) {
    job_->fail(std::make_exception_ptr(std::runtime_error(reason)));
  }

  // Throws where the copies are not the state at the call.
  void check() {
    job_->check();
    if (const std::shared_ptr<const Sources> sources = sources_.lock()) {
      try {
        sources->check();
      } catch (...) {
        job_->fail(std::current_exception());
        throw;
      }
    }
  }

  void release_sources() {
    const CurrentDevice current_device(!programs_.empty());
    GilRelease release;
    job_->release_sources();
  }

  void release() {
    tensors_ = py::list();
    const CurrentDevice current_device(!programs_.empty());
    GilRelease release;
    job_->release_regions();
    job_->release_sources();
    streamed_.reset();
  }

 private:
  void hand_out(const py::list& leaves, const std::vector<StageSource>& sources,
                const std::vector<at::Tensor>& tensors) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (!tensors[i].defined()) continue;
      if (const std::shared_ptr<Staged>& staged = job_->staged()[i]) {
        tensors_[i] = make_staged_tensor(staged, tensors[i], !sources[i].strided);
      } else {
        // No room: the writer is to read it from where it is.
        tensors_[i] = leaves[i];
        if (!sources[i].guarded) streamed_volatile_bytes_ += sources[i].size;
      }
    }
  }

  const std::shared_ptr<Engine> engine_;
  std::shared_ptr<StageJob> job_;
  std::vector<Program> programs_;
  py::list tensors_;
  std::weak_ptr<const Sources> sources_;     // as long as the job reads them
  std::shared_ptr<const Sources> streamed_;  // the same, where the writer reads some of them
  uint64_t streamed_volatile_bytes_ = 0;
};

// (descriptor, bytes of the segment, offset in it) of a staged tensor's memory, if it is shared.
std::optional<std::tuple<int, size_t, size_t>> shared_memory_of(const at::Tensor& tensor) {
  const std::shared_ptr<Staged> staged = staged_of(tensor);
  if (!staged || staged->region()->descriptor() < 0) return std::nullopt;
  const Region& region = *staged->region();
  const auto within = static_cast<size_t>(staged->data() - region.data());
  return std::make_tuple(region.descriptor(), region.segment_size(), region.offset() + within);
}

}  // namespace

std::shared_ptr<Staged> staged_of(const at::Tensor& tensor) {
  const c10::DataPtr& memory = tensor.storage().data_ptr();
  if (memory.get_deleter() != &delete_staged) return nullptr;
  const auto& staged = *static_cast<std::shared_ptr<Staged>*>(memory.get_context());
  // A view of a part has another checksum; and is not ours to hand out.
  if (tensor.const_data_ptr() != staged->data() || tensor.nbytes() != staged->size()) {
    return nullptr;
  }
  return staged;
}

void register_staging(py::module_& module) {
  py::class_<StorageSet>(module, "StorageSet")
      .def(py::init<>())
      .def("add", &StorageSet::add, py::arg("tensors"))
      .def("__len__", &StorageSet::size);
  py::class_<StageStatistics>(module, "StageStatistics")
      .def_readonly("bytes_staged", &StageStatistics::bytes_staged)
      .def_readonly("bytes_streamed", &StageStatistics::bytes_streamed)
      .def_readonly("seconds", &StageStatistics::seconds);
  py::class_<PyStaging>(module, "Staging")
      .def(py::init([](std::shared_ptr<Engine> engine, const py::list& leaves,
                       const StorageSet* guarded, const std::optional<py::bytes>& wanted,
                       bool shared) {
             std::optional<std::string> mask;
             if (wanted) mask = static_cast<std::string>(*wanted);
             // From here on its destructor cleans up, which a constructor's error would pass over.
             auto staging = std::make_unique<PyStaging>(std::move(engine));
             staging->start(leaves, guarded, mask, shared);
             return staging;
           }),
           py::arg("engine").none(false), py::arg("leaves"), py::kw_only(),
           py::arg("guarded") = nullptr, py::arg("wanted") = std::nullopt,
           py::arg("shared") = false)
      .def("take_tensors", &PyStaging::take_tensors)
      .def_property_readonly("streamed_volatile_bytes", &PyStaging::streamed_volatile_bytes)
      .def("statistics", &PyStaging::statistics)
      .def("wait", &PyStaging::wait)
      .def("guard", &PyStaging::guard)
      .def("fail", &PyStaging::fail, py::arg("reason"))
      .def("check", &PyStaging::check)
      .def("release_sources", &PyStaging::release_sources)
      .def("release", &PyStaging::release);
  module.def("shared_memory_of", &shared_memory_of, py::arg("tensor"));
}

}  // namespace pyckpt
