// Whether boxes fill a larger box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyckpt {

// Whether every element of a tensor of this size is in exactly one of the boxes. Boxes that are
// given twice count once, and those of no elements not at all.
//
// `offsets` and `sizes` have as many numbers a box as `size` has. Boxes may have any numbers; those
// that reach out of the tensor fill it in no case. Takes time in proportion to n log n for n boxes
// that are a grid, or otherwise cut in a few dimensions; throws std::invalid_argument for boxes
// that would take far longer.
bool is_tiling(const std::vector<int64_t>& size, const std::vector<int64_t>& offsets,
               const std::vector<int64_t>& sizes);

}  // namespace pyckpt
