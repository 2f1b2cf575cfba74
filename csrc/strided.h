// Tensors whose elements do not lie one after another in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyckpt {

// A box of elements, as it lies in a file and as it lies in memory. In the file it is in row-major
// order, possibly with gaps (a box cut out of a larger one); in memory it is strided in any way.
// Immutable, so any thread may use it. Offsets in the file count from the box's first byte.
class Strided {
 public:
  struct Dimension {
    uint64_t size;
    uint64_t memory_stride;  // in bytes
    uint64_t file_stride;    // in bytes; at least what the dimensions further in span
  };

  // A tensor without gaps in the file. `sizes` and `strides` in elements, `item_size` in bytes.
  Strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, size_t item_size);
  // A box, outermost dimension first.
  Strided(const std::vector<Dimension>& dimensions, size_t item_size);

  // Writes to `to` the bytes from `begin` on, `size` of them, of the file; from the tensor whose
  // first element is at `base`. There must be no gaps.
  void gather(std::byte* to, const std::byte* base, uint64_t begin, uint64_t size) const;

  // The other way: `from` are the bytes from `begin` on of the file. Bytes in gaps are passed over.
  void scatter(const std::byte* from, std::byte* base, uint64_t begin, uint64_t size) const;

  // Whether the elements stand in memory as they do in the file, without gaps in either.
  bool dense() const { return dimensions_.empty(); }

  // From the first byte to the last, gaps included; and the bytes that count.
  uint64_t file_bytes() const;
  uint64_t memory_bytes() const;

  // The box cut up at the dimensions whose gaps are wider than `gap_max`: one box for all pieces,
  // and where each begins, in the file and in memory. Throws std::invalid_argument for far too
  // many.
  struct Place {
    uint64_t file_offset;
    uint64_t memory_offset;
  };
  std::shared_ptr<const Strided> split(uint64_t gap_max, std::vector<Place>* places) const;

 private:
  template <typename Copy>
  void walk(uint64_t begin, uint64_t size, const Copy& copy) const;

  std::vector<Dimension> dimensions_;  // neighbours that can be one are one
  uint64_t run_bytes_;                 // what lies together at the innermost, in file and memory
};

}  // namespace pyckpt
