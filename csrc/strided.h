// Tensors whose elements do not lie one after another in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyckpt {

// The shape of a strided tensor in host memory; reads any part of it as if its elements stood in
// row-major order without gaps. Immutable, so any thread may use it.
class Strided {
 public:
  // `sizes` in elements, `strides` in elements, `item_size` in bytes. Strides may be 0, not
  // negative.
  Strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, size_t item_size);

  // Writes `size` bytes to `to`: those that begin at byte `begin` of the row-major order of the
  // tensor whose first element is at `base`.
  void gather(std::byte* to, const std::byte* base, uint64_t begin, uint64_t size) const;

 private:
  struct Dimension {
    uint64_t size;
    uint64_t stride_bytes;
  };
  std::vector<Dimension> dimensions_;  // outermost first; neighbours that can be one are one
  uint64_t run_bytes_;                 // what lies together at the innermost
};

}  // namespace pyckpt
