#include "strided.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pyckpt {
namespace {

constexpr size_t kPlacesMax = size_t{1} << 26;  // a gigabyte of them

// `count` runs of `Size` bytes. A size known to the compiler makes each copy one load and one
// store.
template <size_t Size>
void copy_values(std::byte* to, uint64_t to_stride, const std::byte* from, uint64_t from_stride,
                 uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, Size);
  }
}

void copy_runs(std::byte* to, uint64_t to_stride, const std::byte* from, uint64_t from_stride,
               uint64_t count, uint64_t run) {
  switch (run) {
    case 1:
      return copy_values<1>(to, to_stride, from, from_stride, count);
    case 2:
      return copy_values<2>(to, to_stride, from, from_stride, count);
    case 4:
      return copy_values<4>(to, to_stride, from, from_stride, count);
    case 8:
      return copy_values<8>(to, to_stride, from, from_stride, count);
    case 16:
      return copy_values<16>(to, to_stride, from, from_stride, count);
    default:
      for (uint64_t i = 0; i < count; ++i) {
        std::memcpy(to + i * to_stride, from + i * from_stride, run);
      }
  }
}

std::vector<Strided::Dimension> without_gaps(const std::vector<int64_t>& sizes,
                                             const std::vector<int64_t>& strides,
                                             size_t item_size) {
  std::vector<Strided::Dimension> dimensions(sizes.size());
  uint64_t file_stride = item_size;
  for (size_t d = sizes.size(); d-- > 0;) {
    dimensions[d] = {static_cast<uint64_t>(sizes[d]), static_cast<uint64_t>(strides[d]) * item_size,
                     file_stride};
    file_stride *= dimensions[d].size;
  }
  return dimensions;
}

}  // namespace

Strided::Strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 size_t item_size)
    : Strided(without_gaps(sizes, strides, item_size), item_size) {}

Strided::Strided(const std::vector<Dimension>& dimensions, size_t item_size)
    : run_bytes_(item_size) {
  for (size_t d = dimensions.size(); d-- > 0;) {
    const Dimension& dimension = dimensions[d];
    if (dimension.size == 1) continue;
    if (dimensions_.empty()) {
      if (dimension.memory_stride == run_bytes_ && dimension.file_stride == run_bytes_) {
        run_bytes_ *= dimension.size;
        continue;
      }
    } else {
      Dimension& inner = dimensions_.back();
      if (dimension.memory_stride == inner.memory_stride * inner.size &&
          dimension.file_stride == inner.file_stride * inner.size) {
        inner.size *= dimension.size;
        continue;
      }
    }
    dimensions_.push_back(dimension);
  }
  std::reverse(dimensions_.begin(), dimensions_.end());
}

// Calls copy(file offset, file stride, memory offset, memory stride, number of runs, bytes a run)
// for the runs, or parts of one, that lie in the given range of the file.
template <typename Copy>
void Strided::walk(uint64_t begin, uint64_t size, const Copy& copy) const {
  const uint64_t end = begin + size;
  if (dimensions_.empty()) {
    if (begin < std::min(end, run_bytes_)) {
      copy(begin, 0, begin, 0, 1, std::min(end, run_bytes_) - begin);
    }
    return;
  }
  // The last run that begins at `begin` or before it: its index in each dimension.
  std::vector<uint64_t> index(dimensions_.size());
  uint64_t rest = begin;
  for (size_t d = 0; d < index.size(); ++d) {
    const Dimension& dimension = dimensions_[d];
    index[d] = std::min(rest / dimension.file_stride, dimension.size - 1);
    rest -= index[d] * dimension.file_stride;
  }
  const Dimension& inner = dimensions_.back();
  while (index[0] < dimensions_[0].size) {
    uint64_t file = 0;
    uint64_t memory = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      file += index[d] * dimensions_[d].file_stride;
      memory += index[d] * dimensions_[d].memory_stride;
    }
    if (file >= end) return;
    uint64_t runs = 1;
    if (file >= begin && file + run_bytes_ <= end) {
      runs = std::min(inner.size - index.back(), (end - file - run_bytes_) / inner.file_stride + 1);
      copy(file, inner.file_stride, memory, inner.memory_stride, runs, run_bytes_);
    } else {
      const uint64_t from = std::max(file, begin);
      const uint64_t to = std::min(file + run_bytes_, end);
      if (from < to) copy(from, 0, memory + (from - file), 0, 1, to - from);
    }
    index.back() += runs;
    for (size_t d = index.size() - 1; d > 0 && index[d] == dimensions_[d].size; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

void Strided::gather(std::byte* to, const std::byte* base, uint64_t begin, uint64_t size) const {
  walk(begin, size,
       [&](uint64_t file, uint64_t file_stride, uint64_t memory, uint64_t memory_stride,
           uint64_t runs, uint64_t run) {
         copy_runs(to + (file - begin), file_stride, base + memory, memory_stride, runs, run);
       });
}

void Strided::scatter(const std::byte* from, std::byte* base, uint64_t begin, uint64_t size) const {
  walk(begin, size,
       [&](uint64_t file, uint64_t file_stride, uint64_t memory, uint64_t memory_stride,
           uint64_t runs, uint64_t run) {
         copy_runs(base + memory, memory_stride, from + (file - begin), file_stride, runs, run);
       });
}

uint64_t Strided::file_bytes() const {
  uint64_t bytes = run_bytes_;
  for (const Dimension& dimension : dimensions_) {
    if (dimension.size == 0) return 0;
    bytes += (dimension.size - 1) * dimension.file_stride;
  }
  return bytes;
}

uint64_t Strided::memory_bytes() const {
  uint64_t bytes = run_bytes_;
  for (const Dimension& dimension : dimensions_) bytes *= dimension.size;
  return bytes;
}

std::shared_ptr<const Strided> Strided::split(uint64_t gap_max, std::vector<Place>* places) const {
  // Dimensions before `outer` are walked here, those from it on make up the pieces.
  size_t outer = dimensions_.size();
  uint64_t span = run_bytes_;
  while (outer > 0 && dimensions_[outer - 1].file_stride <= span + gap_max) {
    --outer;
    span += (dimensions_[outer].size - 1) * dimensions_[outer].file_stride;
  }
  places->assign(1, Place{0, 0});
  for (size_t d = 0; d < outer; ++d) {
    if (dimensions_[d].size > kPlacesMax / places->size()) {
      throw std::invalid_argument("the box is cut into more pieces than can be read");
    }
    std::vector<Place> finer;
    finer.reserve(places->size() * dimensions_[d].size);
    for (const Place& place : *places) {
      for (uint64_t i = 0; i < dimensions_[d].size; ++i) {
        finer.push_back({place.file_offset + i * dimensions_[d].file_stride,
                         place.memory_offset + i * dimensions_[d].memory_stride});
      }
    }
    places->swap(finer);
  }
  auto piece = std::make_shared<Strided>(*this);
  piece->dimensions_.erase(piece->dimensions_.begin(),
                           piece->dimensions_.begin() + static_cast<ptrdiff_t>(outer));
  return piece;
}

}  // namespace pyckpt
