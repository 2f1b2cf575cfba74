// The plan of all ranks: who writes what, made of the ranks' blocks without an object an item.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "columns.h"
#include "place_block.h"
#include "plan_block.h"

namespace pyckpt {

// What the coordinator tells a rank of each of its items, in the order of its block.
constexpr uint32_t kNotWritten = 0;  // another rank does
// Any other number: this rank writes it, and it is the chunk of its tensor before that number.

// Throws std::invalid_argument for an answer to a rank of another number of items.
std::vector<uint32_t> unpack_answer(std::string_view packed, size_t items);

class GlobalPlan {
 public:
  // What one rank has.
  struct Rank {
    std::string_view block;
    // A byte for each item of the block: whether the rank wrote it by the plan before, so that it
    // may have staged that and nothing else.
    std::optional<std::string_view> wrote;
  };

  // Does what pyckpt.SavePlanner and DCP do in Python, with the same outcome:
  // - what ranks contradict each other about is found (`conflicts`);
  // - of the ranks that have the same part of a tensor one writes it: one that wrote it before, or
  //   else the one with the least to write, or of these the first;
  // - keys and chunks stand in the order in which the ranks, one after another, write them;
  // - chunks that are not one tensor are found (`errors`).
  //
  // Throws std::invalid_argument, which names the rank, for a block that is damaged or of another
  // version. Takes time in proportion to the number of items.
  explicit GlobalPlan(const std::vector<Rank>& ranks);

  // Where there are any, the plan must not be used.
  const std::vector<std::string>& conflicts() const { return conflicts_; }
  const std::vector<std::string>& errors() const { return errors_; }

  // What all ranks write; in the order of DCP's metadata.
  const std::shared_ptr<Columns>& columns() const { return columns_; }
  size_t ranks() const { return first_.size() - 1; }
  // How many items a rank writes, and which of the columns they are, in the order of its block.
  size_t written(size_t rank) const { return first_written_[rank + 1] - first_written_[rank]; }
  uint64_t item(size_t rank, size_t index) const { return written_[first_written_[rank] + index]; }
  // The answer to a rank; see `unpack_answer`.
  std::string answer(size_t rank) const;
  // For each item of a rank's block, whether it writes it: a byte.
  std::string wrote(size_t rank) const;

  // The keys that say where they are in the state dict, as DCP joins them: those of later ranks
  // first, and each as the first rank says it.
  std::vector<std::pair<const KeyTable*, uint32_t>> paths() const;

  // About what it takes, with the columns.
  size_t memory_bytes() const;

  // Says where the items lie that a rank wrote, in a file of that name. Throws
  // std::invalid_argument for results that are damaged, or of other items. One thread at a time.
  void place(size_t rank, const std::string& file, std::string_view places);
  // Only their checksums have changed.
  void check(size_t rank, const std::string& file, std::string_view checksums);

 private:
  struct Table {
    std::shared_ptr<const KeyTable> keys;
    size_t first_rank;
    size_t last_rank;
  };
  class Merge;

  void expect_items(size_t rank, size_t found) const;

  std::vector<Table> tables_;
  std::vector<std::string> conflicts_;
  std::vector<std::string> errors_;
  std::shared_ptr<Columns> columns_;
  // Of all ranks' items, one rank after another:
  std::vector<size_t> first_;      // where each rank's begin
  std::vector<uint32_t> answers_;  // what each is told
  std::vector<size_t> first_written_;
  std::vector<uint64_t> written_;
  std::vector<uint32_t> files_;  // of each rank; Columns::kNone where it writes nothing
};

}  // namespace pyckpt
