#include "image.h"

#include <algorithm>
#include <utility>

namespace pyckpt {
namespace {

void count_piece(Item* item) {
  item->pieces_left.fetch_add(1, std::memory_order_relaxed);
  item->pieces_held.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Image::Image(const Options& options) : options_(options) {}

Item& Image::add(std::shared_ptr<const Envelope> envelope, Source source,
                 std::vector<Window>* full) {
  Item& item = items_.emplace_back();
  item.envelope = std::move(envelope);
  item.source = std::move(source);
  const uint64_t prefix = item.envelope ? item.envelope->prefix.size() : 0;
  const uint64_t suffix = item.envelope ? item.envelope->suffix.size() : 0;
  const uint64_t payload = item.source.size;

  item.offset = end_;
  if (payload >= kAlignedPayloadMin) {
    item.offset = round_up(end_ + prefix, kPage) - prefix;
  }
  item.payload_offset = prefix;
  item.length = prefix + payload + suffix;

  append(&item, Part::kGap, end_, item.offset, full);
  const uint64_t cuts_before = cuts_;
  append(&item, Part::kPrefix, 0, prefix, full);
  if (fits_in_place(item)) {
    append_in_place(&item, full);
  } else {
    append(&item, Part::kPayload, 0, payload, full);
  }
  append(&item, Part::kSuffix, 0, suffix, full);
  item.spans_windows = cuts_ != cuts_before;
  return item;
}

void Image::finish(std::vector<Window>* full) {
  if (window_.size > 0) cut(full);
}

void Image::append(Item* item, Part part, uint64_t begin, uint64_t end, std::vector<Window>* full) {
  while (begin < end) {
    const uint64_t step = std::min(options_.slot_bytes - window_.size, end - begin);
    if (part != Part::kGap) window_.pieces.push_back({item, part, begin, step, window_.size});
    // Threads see the window, and so this count, only after the whole item was added.
    if (part == Part::kPayload) count_piece(item);
    window_.size += step;
    end_ += step;
    begin += step;
    if (window_.size == options_.slot_bytes) cut(full);
  }
}

// The payload's aligned body goes out in windows of its own; its tail, shorter than the alignment,
// shares the next window with what follows.
void Image::append_in_place(Item* item, std::vector<Window>* full) {
  if (window_.size > 0) cut(full);
  const uint64_t body = item->source.size / options_.alignment * options_.alignment;
  for (uint64_t begin = 0; begin < body;) {
    const uint64_t step = std::min(options_.slot_bytes, body - begin);
    window_.in_place = true;
    window_.size = step;
    window_.pieces.push_back({item, Part::kPayload, begin, step, 0});
    count_piece(item);
    end_ += step;
    begin += step;
    cut(full);
  }
  append(item, Part::kPayload, body, item->source.size, full);
}

void Image::cut(std::vector<Window>* full) {
  full->push_back(std::move(window_));
  ++cuts_;
  window_ = Window();
  window_.offset = end_;
}

bool Image::fits_in_place(const Item& item) const {
  const Source& source = item.source;
  return source.size >= kInPlaceMin && !source.strided && !source.device &&
         reinterpret_cast<uintptr_t>(source.data) % options_.in_place_memory == 0 &&
         (item.offset + item.payload_offset) % options_.alignment == 0;
}

}  // namespace pyckpt
