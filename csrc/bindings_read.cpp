#include "bindings_read.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

namespace pyckpt {

PyReadJob::PyReadJob(std::shared_ptr<Engine> engine, const std::string& direct, bool checksum)
    : engine_(std::move(engine)), job_(engine_->make_read(to_direct(direct), checksum)) {}

size_t PyReadJob::add_file(const std::string& path) {
  check_idle();
  GilRelease release;
  const size_t file = job_->add_file(path);
  files_ = file + 1;
  return file;
}

std::optional<int64_t> PyReadJob::add_tensor(
    size_t file, uint64_t offset, const at::Tensor& tensor,
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

std::vector<std::optional<int64_t>> PyReadJob::add_tensors(const py::list& files,
                                                           const py::list& offsets,
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

int64_t PyReadJob::add_buffer(size_t file, uint64_t offset, const py::object& buffer) {
  buffers_.emplace_back(buffer, PyBUF_WRITABLE);
  const ContiguousBuffer& view = buffers_.back();
  check_place(file, offset, view.size());
  return static_cast<int64_t>(
      job_->add(file, offset, view.size(), {view.data(), nullptr, nullptr}));
}

int64_t PyReadJob::add_memory(size_t file, uint64_t offset, std::byte* data, size_t size,
                              std::shared_ptr<const void> owner) {
  check_place(file, offset, size);
  owners_.push_back(std::move(owner));
  return static_cast<int64_t>(job_->add(file, offset, size, {data, nullptr, nullptr}));
}

std::vector<uint32_t> PyReadJob::run() {
  if (job_->forked()) throw EngineClosed("the job was made in another process, before a fork");
  if (running_.exchange(true)) throw_running();
  const auto done = [this](const void*) { running_ = false; };
  const std::unique_ptr<const void, decltype(done)> ends(this, done);
  for (const auto& [tensor, memory] : tensors_) {
    // Its storage was resized since it was added, perhaps.
    if (!is_plain(tensor) || tensor.const_data_ptr() != memory) {
      throw std::invalid_argument("the memory of a tensor that is to be read was freed or moved");
    }
  }
  programs_.follow();  // may throw, and then the job still has them to read into
  // The job is through with them, whether it comes to its end or throws.
  const auto tensors = std::move(tensors_);
  const auto buffers = std::move(buffers_);
  const auto owners = std::move(owners_);
  files_ = 0;
  const CurrentDevice current_device(!programs_.all().empty());
  GilRelease release;
  return job_->run();
}

void PyReadJob::check_idle() const {
  if (running_) throw_running();
}

void PyReadJob::check_place(size_t file, uint64_t offset, uint64_t size) const {
  check_idle();
  if (file >= files_) throw std::invalid_argument("there is no file of this number");
  if (size > kFileMax || offset > kFileMax - size) {
    throw std::invalid_argument("the bytes would lie beyond the end of any file");
  }
}

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
           py::arg("engine").none(false), py::kw_only(), py::arg("direct") = "auto",
           py::arg("checksum") = true)
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

}  // namespace pyckpt
