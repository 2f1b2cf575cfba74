// PeerJob, as Python sees it: with what keeps the memory alive that it fills.
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_tensor.h"
#include "error.h"
#include "peer_job.h"

namespace pyckpt {
namespace {

class PyPeerJob {
 public:
  explicit PyPeerJob(std::shared_ptr<Engine> engine)
      : engine_(std::move(engine)), job_(engine_->make_peer_copy()) {}

  void add(pid_t process, uint64_t address, const at::Tensor& tensor) {
    check_idle();
    if (process <= 0) throw std::invalid_argument("processes have positive numbers");
    if (!is_plain(tensor) || !tensor.is_cpu() || !tensor.is_contiguous()) {
      throw std::invalid_argument("the tensor must be contiguous memory of the host");
    }
    if (tensor.numel() == 0) return;
    auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
    tensors_.emplace_back(tensor, data);
    job_->add(process, address, data, tensor.nbytes());
  }

  void run() {
    if (job_->forked()) throw EngineClosed("the job was made in another process, before a fork");
    if (running_.exchange(true)) throw_running();
    const auto done = [this](const void*) { running_ = false; };
    const std::unique_ptr<const void, decltype(done)> ends(this, done);
    for (const auto& [tensor, memory] : tensors_) {
      // Its storage was resized since it was added, perhaps.
      if (tensor.const_data_ptr() != memory) {
        throw std::invalid_argument("the memory of a tensor that is to be filled was moved");
      }
    }
    const auto tensors = std::move(tensors_);
    tensors_.clear();
    GilRelease release;
    job_->run();
  }

 private:
  void check_idle() const {
    if (running_) throw_running();
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<PeerJob> job_;
  std::atomic<bool> running_{false};
  std::vector<std::pair<at::Tensor, const void*>> tensors_;  // and where their memory was
};

}  // namespace

void register_peer_job(py::module_& module) {
  py::class_<PyPeerJob>(module, "PeerJob")
      .def(py::init<std::shared_ptr<Engine>>(), py::arg("engine").none(false))
      .def("add", &PyPeerJob::add, py::arg("process"), py::arg("address"), py::arg("tensor"))
      .def("run", &PyPeerJob::run);
  module.def("let_peers_read", &let_peers_read, py::arg("allowed"));
}

}  // namespace pyckpt
