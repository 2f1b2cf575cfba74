// What ranks would save under the same names, and is not the same thing; see
// pyckpt/dcp/conflicts.py, which says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "plan_block.h"

namespace pyckpt {

class PlanConflicts {
 public:
  // Compares what a rank has with what the ranks had that were added before. Ranks of one table
  // have the same: only the first of them need be added.
  void add(const KeyTable& keys, size_t rank);

  // A line for each name.
  const std::vector<std::string>& found() const { return found_; }

 private:
  enum class Kind : uint8_t { kObject, kTensor, kList, kDict };
  // What is at a path on the first rank that has something there.
  struct Thing {
    Kind kind;
    std::vector<int64_t> shape;
    size_t rank;
    uint64_t length = 0;       // of a list
    size_t last_rank;          // that has something there
    uint64_t last_length = 0;  // of that rank's list
  };
  using Things = std::unordered_map<std::string, Thing>;  // by their paths, encoded

  static std::string describe(Kind kind, const std::vector<int64_t>& shape);
  // What is at the path; compared with what this rank has there, if it is the first that it says.
  Things::value_type* note(const std::string& path, Kind kind, const std::vector<int64_t>& shape,
                           size_t rank);
  void conflict(const std::string& path, const std::string& line);

  Things things_;  // each stays where it is
  std::unordered_set<std::string> named_;
  std::vector<std::string> found_;
};

}  // namespace pyckpt
