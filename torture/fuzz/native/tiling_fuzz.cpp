// Boxes against counting each element.
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

#include "fuzz.h"
#include "tiling.h"

namespace {

using Numbers = std::vector<int64_t>;

bool counted(const Numbers& size, const std::set<Numbers>& boxes) {
  const size_t dims = size.size();
  size_t elements = 1;
  for (const int64_t one : size) elements *= static_cast<size_t>(one);
  std::vector<int> counts(elements);
  for (const Numbers& box : boxes) {
    Numbers at(box.begin(), box.begin() + static_cast<std::ptrdiff_t>(dims));
    for (size_t d = 0; d < dims; ++d) {
      if (at[d] < 0 || box[dims + d] < 0 || at[d] > size[d] || box[dims + d] > size[d] - at[d]) {
        return false;
      }
    }
    bool is_nothing = false;
    for (size_t d = 0; d < dims; ++d) is_nothing |= box[dims + d] == 0;
    while (!is_nothing) {
      size_t place = 0;
      for (size_t d = 0; d < dims; ++d) {
        place = place * static_cast<size_t>(size[d]) + static_cast<size_t>(at[d]);
      }
      ++counts[place];
      size_t d = dims;
      while (d > 0 && ++at[d - 1] == box[d - 1] + box[dims + d - 1]) {
        at[d - 1] = box[d - 1];
        --d;
      }
      if (d == 0) break;
    }
  }
  for (const int count : counts) {
    if (count != 1) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length) {
  using namespace pyckpt;
  fuzz::Input input(data, length);
  const bool is_small = input.below(4) != 0;
  const size_t dims = input.below(is_small ? 5 : 30);
  const auto number = [&] {
    return is_small ? static_cast<int64_t>(input.below(7)) : input.number();
  };
  Numbers size(dims), offsets, sizes;
  for (int64_t& one : size) one = number();
  std::set<Numbers> boxes;
  bool is_empty = false;
  for (const int64_t one : size) is_empty |= one == 0;
  const size_t count = input.left() / (2 * dims + 1);
  for (size_t i = 0; i < count; ++i) {
    Numbers box(2 * dims);
    for (int64_t& one : box) one = number();
    offsets.insert(offsets.end(), box.begin(), box.begin() + static_cast<std::ptrdiff_t>(dims));
    sizes.insert(sizes.end(), box.begin() + static_cast<std::ptrdiff_t>(dims), box.end());
    boxes.insert(box);
  }
  bool found = false;
  try {
    found = is_tiling(size, offsets, sizes);
  } catch (const std::invalid_argument&) {
    return 0;
  }
  // Without dimensions there are no numbers to count the boxes by.
  if (is_small && !is_empty && dims != 0) REQUIRE(found == counted(size, boxes));
  return 0;
}
