// What ranks would save under the same names, and is not the same thing; see
// pyckpt/dcp/conflicts.py, which says why.
#pragma once

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
  struct Thing {
    Kind kind = Kind::kObject;
    std::vector<int64_t> shape;
    size_t rank = 0;
    uint64_t length = 0;  // of a list
  };

  static std::string describe(const Thing& thing);
  void conflict(const std::string& path, const std::string& line);

  std::unordered_map<std::string, Thing> things_;  // by their paths, encoded
  std::unordered_set<std::string> named_;
  std::vector<std::string> found_;
};

}  // namespace pyckpt
