// What a rank's file looks like: items one after another, cut into windows of one slot.
//
// docs/format.md is the format's home; the tests hold this file to it byte for byte.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "device.h"
#include "envelope.h"
#include "sizes.h"
#include "strided.h"

namespace pyckpt {

class Staged;

// Memory whose bytes are an item's payload. It must stay as it is until the item was consumed.
struct Source {
  const std::byte* data = nullptr;
  uint64_t size = 0;
  std::shared_ptr<const Strided> strided;  // null: the bytes lie one after another
  std::shared_ptr<Device> device;          // null: host memory
  std::shared_ptr<Staged> staged;  // null: the bytes are there; else they may be on their way
};

struct Item {
  // Arguments.
  std::shared_ptr<const Envelope> envelope;  // null: the payload is the whole item
  Source source;

  // Where it lies, known once it was added to an image.
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t payload_offset = 0;  // from `offset`
  bool spans_windows = false;   // so that a thread may wait for what others do

  // What the windows gather: each piece of the payload XORs its part of the checksum in, then
  // counts itself off; and again when its memory is not needed any more, which for a piece that is
  // written from where it lies is after the write.
  std::atomic<uint32_t> crc{0};
  std::atomic<uint32_t> pieces_left{0};
  std::atomic<uint32_t> pieces_held{0};
};

enum class Part : uint8_t { kGap, kPrefix, kPayload, kSuffix };

// A run of bytes of one part of an item, at one place of a window.
struct Piece {
  Item* item;
  Part part;
  uint64_t begin;  // within the part
  uint64_t size;
  uint64_t at;  // within the window
};

// A range of the file that is written at once. Its bytes that no piece covers are zero.
struct Window {
  uint64_t offset = 0;
  uint64_t size = 0;
  bool in_place = false;  // its one piece can be written from where it lies
  std::vector<Piece> pieces;
};

// Lays items out and cuts windows. Windows begin at multiples of `alignment` and, but for the last,
// end at one. Owns the items. Not thread-safe.
class Image {
 public:
  struct Options {
    uint64_t slot_bytes;       // the size of a window at most; a multiple of `alignment`
    uint64_t alignment;        // of file offsets
    uint64_t in_place_memory;  // memory at a multiple of this may be written in place
  };
  explicit Image(const Options& options);

  // Adds an item after those before it; windows that became full are appended to `full`.
  Item& add(std::shared_ptr<const Envelope> envelope, Source source, std::vector<Window>* full);
  // The last window, if there is any.
  void finish(std::vector<Window>* full);

  uint64_t size() const { return end_; }
  const std::deque<Item>& items() const { return items_; }

 private:
  void append(Item* item, Part part, uint64_t begin, uint64_t end, std::vector<Window>* full);
  void append_in_place(Item* item, std::vector<Window>* full);
  void cut(std::vector<Window>* full);
  bool fits_in_place(const Item& item) const;

  const Options options_;
  std::deque<Item> items_;  // a deque, for addresses that stay
  uint64_t end_ = 0;        // of the last item
  uint64_t cuts_ = 0;       // windows cut so far
  Window window_;  // the one being filled; covers up to window_.offset + window_.size == end_
};

}  // namespace pyckpt
