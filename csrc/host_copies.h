// The part of a staging that threads do: copies of host memory, cut into units.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "job.h"
#include "staged.h"

namespace pyckpt {

// Copies host memory, checksumming on the way. Owns the list of copies; who waits for whom, and
// what became of an error, is the StageJob's to know. One thread adds; once it has cut, any may
// take.
class HostCopies {
 public:
  void add(const StageSource& source, std::shared_ptr<Staged> staged) {
    copies_.push_back({source, std::move(staged)});
  }
  bool empty() const { return copies_.empty(); }

  // Cuts what was added since the last call into units, which come after those before.
  void cut_units();
  size_t units() const { return units_.size(); }

  // The first unit that nobody has taken, for the caller to copy; none from number `limit` on.
  std::optional<size_t> take(size_t limit) noexcept;

  // Copies a unit. A copy whose last piece this is becomes complete, unless `job` has failed.
  void copy(size_t unit, const Job& job);

 private:
  // What a thread does at a time: a piece of one copy, or several small copies.
  struct Unit {
    size_t copy;
    size_t copies;
    uint64_t begin;  // of a piece
    uint64_t size;
  };

  void copy_piece(const StageCopy& copy, uint64_t begin, uint64_t size, const Job& job);

  std::vector<StageCopy> copies_;  // in the order of units
  std::vector<Unit> units_;
  size_t copies_cut_ = 0;  // of copies_, the first ones
  std::atomic<size_t> next_unit_{0};
};

}  // namespace pyckpt
