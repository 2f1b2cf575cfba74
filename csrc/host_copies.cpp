#include "host_copies.h"

#include <algorithm>

#include "crc32.h"
#include "sizes.h"
#include "timeline.h"

namespace pyckpt {
namespace {

// What a thread copies before it looks for more.
constexpr uint64_t kUnit = 1 << 20;

}  // namespace

void HostCopies::cut_units() {
  size_t i = copies_cut_;
  while (i < copies_.size()) {
    const uint64_t size = copies_[i].source.size;
    if (size >= kSmallSource) {
      // Pieces end where blocks do, so that all but the last are whole blocks.
      for (uint64_t begin = 0; begin < size; begin += kUnit) {
        units_.push_back({i, 1, begin, std::min(kUnit, size - begin)});
      }
      copies_[i].staged->pieces_left_ = static_cast<uint32_t>((size + kUnit - 1) / kUnit);
      ++i;
      continue;
    }
    Unit unit{i, 0, 0, 0};
    while (i < copies_.size() && copies_[i].source.size < kSmallSource && unit.size < kUnit) {
      unit.size += copies_[i].source.size;
      ++unit.copies;
      copies_[i].staged->pieces_left_ = 1;
      ++i;
    }
    units_.push_back(unit);
  }
  copies_cut_ = i;
}

std::optional<size_t> HostCopies::take(size_t limit) noexcept {
  size_t unit = next_unit_.load(std::memory_order_relaxed);
  do {
    if (unit >= limit) return std::nullopt;
  } while (!next_unit_.compare_exchange_weak(unit, unit + 1, std::memory_order_relaxed));
  return unit;
}

void HostCopies::copy(size_t index, const Job& job) {
  const Unit& unit = units_[index];
  const Span span("stage", unit.size);
  if (unit.copies == 1) {
    copy_piece(copies_[unit.copy], unit.begin, unit.size, job);
    return;
  }
  for (size_t i = unit.copy; i < unit.copy + unit.copies; ++i) {
    copy_piece(copies_[i], 0, copies_[i].source.size, job);
  }
}

void HostCopies::copy_piece(const StageCopy& copy, uint64_t begin, uint64_t size, const Job& job) {
  const StageSource& source = copy.source;
  Staged& staged = *copy.staged;
  uint32_t crc = 0;
  if (!source.strided) {
    crc = copy_crc32_past_cache(0, staged.data() + begin, source.data + begin, size);
  } else {
    for (uint64_t done = 0; done < size;) {
      const uint64_t step = std::min(kCacheBlock, size - done);
      std::byte* const to = staged.data() + begin + done;
      source.strided->gather(to, source.data, begin + done, step);
      crc = crc32(crc, to, step);
      done += step;
    }
  }
  const uint64_t after = source.size - begin - size;
  staged.crc_.fetch_xor(after == 0 ? crc : crc32_shift(crc, after), std::memory_order_relaxed);
  // A guard that failed meanwhile did not keep the program from the source.
  if (staged.pieces_left_.fetch_sub(1, std::memory_order_acq_rel) == 1 && !job.has_failed()) {
    staged.complete_.store(true, std::memory_order_release);
  }
}

}  // namespace pyckpt
