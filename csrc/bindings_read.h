// ReadJob, as Python sees it: with what keeps the memory alive that it fills.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_tensor.h"
#include "read_job.h"

namespace pyckpt {

// A ReadJob, and what keeps alive the memory that it fills.
class PyReadJob {
 public:
  PyReadJob(std::shared_ptr<Engine> engine, const std::string& direct, bool checksum);

  size_t add_file(const std::string& path);

  // Returns the number of the range, or -1 where the box takes several; none where the tensor
  // cannot be filled.
  std::optional<int64_t> add_tensor(size_t file, uint64_t offset, const at::Tensor& tensor,
                                    const std::optional<std::vector<int64_t>>& file_stride);
  std::vector<std::optional<int64_t>> add_tensors(const py::list& files, const py::list& offsets,
                                                  const py::list& tensors);
  int64_t add_buffer(size_t file, uint64_t offset, const py::object& buffer);
  // Memory that `owner` keeps. Returns the number of the range.
  int64_t add_memory(size_t file, uint64_t offset, std::byte* data, size_t size,
                     std::shared_ptr<const void> owner);

  std::vector<uint32_t> run();

  ReadStatistics statistics() const { return job_->statistics(); }

 private:
  // Threads that read look at what there is without a lock.
  void check_idle() const;
  void check_place(size_t file, uint64_t offset, uint64_t size) const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<ReadJob> job_;
  std::atomic<size_t> files_{0};
  std::atomic<bool> running_{false};
  Programs programs_;
  std::vector<std::pair<at::Tensor, const void*>> tensors_;  // and where their memory was
  std::vector<ContiguousBuffer> buffers_;
  std::vector<std::shared_ptr<const void>> owners_;
};

}  // namespace pyckpt
