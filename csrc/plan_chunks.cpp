#include "plan_chunks.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tiling.h"

namespace pyckpt {
namespace {

constexpr size_t kLinesMax = 4;

class Chunks {
 public:
  Chunks(const Columns& columns, uint32_t key)
      : columns_(columns), key_(key), dims_(columns.dims(key)), count_(columns.items_of(key)) {}

  size_t dims() const { return dims_; }
  uint64_t count() const { return count_; }
  int64_t extent(size_t d) const { return columns_.size(key_)[d]; }
  int64_t begin(uint64_t chunk, size_t d) const { return columns_.chunk_offsets(key_, chunk)[d]; }
  int64_t size(uint64_t chunk, size_t d) const { return columns_.chunk_sizes(key_, chunk)[d]; }
  // Only of those within the tensor, whose numbers can be added.
  int64_t end(uint64_t chunk, size_t d) const { return begin(chunk, d) + size(chunk, d); }

  bool is_inside(uint64_t chunk) const {
    for (size_t d = 0; d < dims_; ++d) {
      const int64_t at = begin(chunk, d), of = size(chunk, d);
      if (at < 0 || of < 0 || of > extent(d) || at > extent(d) - of) return false;
    }
    return true;
  }
  // Elements of a chunk within the tensor, which is no more than a tensor can have.
  uint64_t volume(uint64_t chunk) const {
    uint64_t product = 1;
    for (size_t d = 0; d < dims_; ++d) product *= static_cast<uint64_t>(size(chunk, d));
    return product;
  }
  uint64_t whole_volume() const {
    uint64_t product = 1;
    for (size_t d = 0; d < dims_; ++d) product *= static_cast<uint64_t>(extent(d));
    return product;
  }
  // As DCP asks it: a box of no elements overlaps what it lies within.
  bool overlap(uint64_t a, uint64_t b) const {
    for (size_t d = 0; d < dims_; ++d) {
      if (begin(a, d) >= end(b, d) || begin(b, d) >= end(a, d)) return false;
    }
    return true;
  }

  std::string shown(uint64_t chunk) const {
    const auto list = [&](const int64_t* numbers) {
      std::string text;
      for (size_t d = 0; d < dims_; ++d) {
        text += (d == 0 ? "" : ", ") + std::to_string(numbers[d]);
      }
      return "[" + text + "]";
    };
    return "offsets " + list(columns_.chunk_offsets(key_, chunk)) + " sizes " +
           list(columns_.chunk_sizes(key_, chunk));
  }
  std::string shape() const {
    std::string text;
    for (size_t d = 0; d < dims_; ++d) text += (d == 0 ? "" : ", ") + std::to_string(extent(d));
    return "[" + text + "]";
  }

  // The dimension along which the chunks are cut, where there is one alone. `dims()` for none.
  std::optional<size_t> cut() const {
    size_t found = dims_;
    for (uint64_t chunk = 0; chunk < count_; ++chunk) {
      for (size_t d = 0; d < dims_; ++d) {
        if (d == found || (begin(chunk, d) == 0 && size(chunk, d) == extent(d))) continue;
        if (found != dims_) return std::nullopt;
        found = d;
      }
    }
    return found;
  }

 private:
  const Columns& columns_;
  const uint32_t key_;
  const size_t dims_;
  const uint64_t count_;
};

// Whether no two of the chunks that have elements overlap, where that is found out quickly. All lie
// within the tensor.
bool are_surely_apart(const Chunks& chunks, const std::vector<uint64_t>& filled, bool is_whole) {
  if (filled.size() < 2) return true;
  if (const std::optional<size_t> cut = chunks.cut()) {
    if (*cut == chunks.dims()) return false;  // each is all of it
    std::vector<std::pair<int64_t, int64_t>> stretches;
    stretches.reserve(filled.size());
    for (const uint64_t chunk : filled) {
      stretches.emplace_back(chunks.begin(chunk, *cut), chunks.end(chunk, *cut));
    }
    if (!std::is_sorted(stretches.begin(), stretches.end())) {
      std::sort(stretches.begin(), stretches.end());
    }
    for (size_t i = 1; i < stretches.size(); ++i) {
      if (stretches[i].first < stretches[i - 1].second) return false;
    }
    return true;
  }
  if (!is_whole) return false;
  // They have as many elements as the tensor: where each of its elements is in one, none is in two.
  std::vector<int64_t> shape, offsets, sizes;
  for (size_t d = 0; d < chunks.dims(); ++d) shape.push_back(chunks.extent(d));
  for (const uint64_t chunk : filled) {
    for (size_t d = 0; d < chunks.dims(); ++d) {
      offsets.push_back(chunks.begin(chunk, d));
      sizes.push_back(chunks.size(chunk, d));
    }
  }
  try {
    return is_tiling(shape, offsets, sizes);
  } catch (const std::invalid_argument&) {  // that takes too long
    return false;
  }
}

// The dimension in which the chunks begin at the most places.
size_t sweep_dimension(const Chunks& chunks) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < chunks.dims(); ++d) {
    std::vector<int64_t> begins(chunks.count());
    for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk)
      begins[chunk] = chunks.begin(chunk, d);
    std::sort(begins.begin(), begins.end());
    const auto places =
        static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (places > most) {
      most = places;
      best = d;
    }
  }
  return best;
}

// Calls back with each pair that overlaps, as long as that returns true.
template <typename Function>
void sweep(const Chunks& chunks, Function on_overlap) {
  const size_t d = sweep_dimension(chunks);
  std::vector<uint64_t> order(chunks.count());
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint64_t a, uint64_t b) { return chunks.begin(a, d) < chunks.begin(b, d); });
  std::vector<uint64_t> open;
  for (const uint64_t chunk : order) {
    const auto is_over = [&](uint64_t other) {
      return chunks.end(other, d) <= chunks.begin(chunk, d);
    };
    open.erase(std::remove_if(open.begin(), open.end(), is_over), open.end());
    for (const uint64_t other : open) {
      if (chunks.overlap(chunk, other) && !on_overlap(chunk, other)) return;
    }
    open.push_back(chunk);
  }
}

}  // namespace

void check_chunks(const Columns& columns, uint32_t key, bool several_ranks,
                  std::vector<std::string>* refused) {
  const Chunks chunks(columns, key);
  if (chunks.dims() == 0) return;  // one element, and nothing to compare
  const size_t most = refused->size() + kLinesMax;
  const auto refuse = [&](const std::string& why) {
    refused->push_back("key:" + std::string(columns.name(key)) + " " + why);
    return refused->size() < most;
  };
  std::vector<uint64_t> filled, empty;
  uint64_t volume = 0;
  bool all_inside = true;
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    if (!chunks.is_inside(chunk)) {
      all_inside = false;
      if (!refuse("has out of bounds chunk: tensor-size:" + chunks.shape() +
                  " chunk: " + chunks.shown(chunk))) {
        return;
      }
      continue;
    }
    const uint64_t of = chunks.volume(chunk);
    (of == 0 ? empty : filled).push_back(chunk);
    if (__builtin_add_overflow(volume, of, &volume)) volume = UINT64_MAX;
  }
  if (!all_inside) return;
  const bool is_whole = volume == chunks.whole_volume();
  const auto overlapping = [&](uint64_t a, uint64_t b) {
    return refuse("has overlapping chunks: " + chunks.shown(a) + " and " + chunks.shown(b));
  };
  if (chunks.count() > 1) {
    if (!are_surely_apart(chunks, filled, is_whole)) {
      sweep(chunks, overlapping);
    } else {
      for (const uint64_t nothing : empty) {
        for (uint64_t other = 0; other < chunks.count(); ++other) {
          if (other != nothing && chunks.overlap(nothing, other) && !overlapping(nothing, other)) {
            return;
          }
        }
      }
    }
  }
  if (several_ranks && !is_whole && refused->size() < most) {
    refuse("invalid fill tensor-volume: " + std::to_string(chunks.whole_volume()) +
           " chunks-volume: " + std::to_string(volume));
  }
}

}  // namespace pyckpt
