#include "strided.h"

#include <algorithm>
#include <cstring>

namespace pyckpt {
namespace {

// `count` values of `Size` bytes, `stride` bytes apart. A size known to the compiler makes each
// copy one load and one store.
template <size_t Size>
void gather_values(std::byte* to, const std::byte* from, uint64_t stride, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) std::memcpy(to + i * Size, from + i * stride, Size);
}

void gather_runs(std::byte* to, const std::byte* from, uint64_t stride, uint64_t count,
                 uint64_t run) {
  switch (run) {
    case 1:
      return gather_values<1>(to, from, stride, count);
    case 2:
      return gather_values<2>(to, from, stride, count);
    case 4:
      return gather_values<4>(to, from, stride, count);
    case 8:
      return gather_values<8>(to, from, stride, count);
    case 16:
      return gather_values<16>(to, from, stride, count);
    default:
      for (uint64_t i = 0; i < count; ++i) std::memcpy(to + i * run, from + i * stride, run);
  }
}

}  // namespace

Strided::Strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 size_t item_size)
    : run_bytes_(item_size) {
  for (size_t i = sizes.size(); i-- > 0;) {
    const Dimension dimension{static_cast<uint64_t>(sizes[i]),
                              static_cast<uint64_t>(strides[i]) * item_size};
    if (dimension.size == 1) continue;
    if (dimensions_.empty() && dimension.stride_bytes == run_bytes_) {
      run_bytes_ *= dimension.size;
    } else if (!dimensions_.empty() && dimension.stride_bytes == dimensions_.back().stride_bytes *
                                                                     dimensions_.back().size) {
      dimensions_.back().size *= dimension.size;
    } else {
      dimensions_.push_back(dimension);
    }
  }
  std::reverse(dimensions_.begin(), dimensions_.end());
}

void Strided::gather(std::byte* to, const std::byte* base, uint64_t begin, uint64_t size) const {
  if (dimensions_.empty()) {
    std::memcpy(to, base + begin, size);
    return;
  }
  // Where the run that holds `begin` lies: its index, split into one index a dimension.
  std::vector<uint64_t> index(dimensions_.size());
  uint64_t rest = begin / run_bytes_;
  uint64_t within = begin % run_bytes_;
  for (size_t d = dimensions_.size(); d-- > 0;) {
    index[d] = rest % dimensions_[d].size;
    rest /= dimensions_[d].size;
  }
  const Dimension& inner = dimensions_.back();
  while (size > 0) {
    const std::byte* from = base;
    for (size_t d = 0; d < index.size(); ++d) from += index[d] * dimensions_[d].stride_bytes;

    uint64_t runs = 1;
    uint64_t bytes = std::min(run_bytes_ - within, size);
    if (within == 0 && size >= run_bytes_) {
      runs = std::min(inner.size - index.back(), size / run_bytes_);
      bytes = runs * run_bytes_;
      gather_runs(to, from, inner.stride_bytes, runs, run_bytes_);
    } else {
      std::memcpy(to, from + within, bytes);
    }
    to += bytes;
    size -= bytes;
    within = 0;  // a run that was cut short at its end was the last

    index.back() += runs;
    for (size_t d = index.size() - 1; d > 0 && index[d] == dimensions_[d].size; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

}  // namespace pyckpt
