#include "metadata_encoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"

namespace pyckpt {
namespace {

constexpr size_t kFrameHeader = 9;
// More than the opcodes around the numbers and names of a thing take.
constexpr size_t kOpcodesMax = 512;
constexpr size_t kNumberMax = 11;  // LONG1 of nine bytes

// Opcodes on their way into frames. `room` must be asked for before anything is put.
class Frames {
 public:
  explicit Frames(const std::function<void(std::string_view)>& write)
      : write_(write), buffer_(2 * kFrameMin) {}

  void room(size_t size) {
    if (buffer_.size() - used_ < size) buffer_.resize(std::max(2 * buffer_.size(), used_ + size));
  }

  void byte(uint8_t value) { buffer_[used_++] = value; }

  void bytes(const void* from, size_t size) {
    if (size != 0) std::memcpy(buffer_.data() + used_, from, size);
    used_ += size;
  }

  template <size_t kCount>
  void piece(const std::array<uint8_t, kCount>& opcodes) {
    bytes(opcodes.data(), kCount);
  }

  void get(uint32_t slot) { numbered(op::kGet1, op::kGet4, slot); }
  void put(uint32_t slot) { numbered(op::kPut1, op::kPut4, slot); }

  void number(uint64_t value) {
    if (value <= UINT8_MAX) {
      byte(op::kInt1);
      byte(static_cast<uint8_t>(value));
    } else if (value <= UINT16_MAX) {
      byte(op::kInt2);
      little_endian(value, 2);
    } else if (value <= INT32_MAX) {
      byte(op::kInt4);
      little_endian(value, 4);
    } else {
      size_t size = 4;  // with a bit for the sign
      while (size < 8 && value >> (8 * size - 1) != 0) ++size;
      const bool has_ninth = value >> 63 != 0;
      byte(op::kLong1);
      byte(static_cast<uint8_t>(size + has_ninth));
      little_endian(value, size);
      if (has_ninth) byte(0);
    }
  }

  // With its own room.
  void text(std::string_view value) {
    if (value.size() > UINT32_MAX) throw std::invalid_argument("a name is too long");
    room(value.size() + kOpcodesMax);
    if (value.size() <= UINT8_MAX) {
      byte(op::kText1);
      byte(static_cast<uint8_t>(value.size()));
    } else {
      byte(op::kText4);
      little_endian(value.size(), 4);
    }
    bytes(value.data(), value.size());
  }

  void size(const int64_t* numbers, size_t dims) {
    piece(piece::kSize);
    tuple(numbers, dims);
    piece(piece::kCall);
  }

  void tuple(const int64_t* numbers, size_t count) {
    if (count == 0) return byte(op::kTuple0);
    if (count > 3) byte(op::kMark);
    for (size_t i = 0; i < count; ++i) number(static_cast<uint64_t>(numbers[i]));
    byte(count > 3 ? +op::kTuple : static_cast<uint8_t>(op::kTuple1 + count - 1));
  }

  // Where a frame may end.
  void cut() {
    if (used_ - kFrameHeader >= kFrameMin) frame({});
  }

  // A frame of what was put since the last, and of more.
  void frame(std::string_view more) {
    const size_t end = used_;
    used_ = 0;
    byte(op::kFrame);
    little_endian(end - kFrameHeader + more.size(), 8);
    give({reinterpret_cast<const char*>(buffer_.data()), end});
    if (!more.empty()) give(more);
    used_ = kFrameHeader;
  }

  void give(std::string_view written) {
    sum_.crc32 = crc32(sum_.crc32, written.data(), written.size());
    sum_.bytes += written.size();
    write_(written);
  }

  const MetadataSum& sum() const { return sum_; }

 private:
  void little_endian(uint64_t value, size_t size) {
    for (size_t i = 0; i < size; ++i) byte(static_cast<uint8_t>(value >> (8 * i)));
  }

  void numbered(uint8_t narrow, uint8_t wide, uint32_t slot) {
    if (slot <= UINT8_MAX) {
      byte(narrow);
      byte(static_cast<uint8_t>(slot));
    } else {
      byte(wide);
      little_endian(slot, 4);
    }
  }

  const std::function<void(std::string_view)>& write_;
  std::vector<uint8_t> buffer_;
  size_t used_ = kFrameHeader;
  MetadataSum sum_{0, 0};
};

class Encoder {
 public:
  Encoder(const Columns& columns, const MetadataNames& names, const MetadataExtras& extras,
          const std::function<void(std::string_view)>& write)
      : columns_(columns), names_(names), extras_(extras), out_(write) {}

  MetadataSum run() {
    out_.give({reinterpret_cast<const char*>(piece::kProto.data()), piece::kProto.size()});
    out_.frame(extras_.planner_data);
    prelude();
    files();
    for (uint32_t key = 0; key < columns_.key_count(); ++key) {
      if (columns_.is_tensor(key)) {
        tensor(key);
      } else {
        object(key);
      }
    }
    ending();
    out_.frame({});
    return out_.sum();
  }

 private:
  void literal(const std::string& opcodes) {
    out_.room(opcodes.size());
    out_.bytes(opcodes.data(), opcodes.size());
  }

  void prelude() {
    out_.room(kOpcodesMax);
    out_.piece(piece::kPutPlannerData);
    literal(metadata_prelude(names_));
    for (uint32_t number = 0; number < columns_.properties_count(); ++number) {
      properties(columns_.properties(number));
      out_.put(slot::variable(number));
      out_.byte(op::kPop);
    }
  }

  // The state of DCP's TensorProperties.
  void properties(const Properties& of) {
    if (names_.dtypes.count(of.dtype) == 0 || names_.layouts.count(of.layout) == 0 ||
        of.memory_format > 2) {
      throw std::invalid_argument("this torch has no tensors of " + of.dtype + ", " + of.layout);
    }
    out_.room(of.dtype.size() + kOpcodesMax);
    out_.byte(op::kMark);
    out_.piece(piece::kDtype);
    out_.bytes(of.dtype.data(), of.dtype.size());
    out_.byte('\n');
    out_.piece(piece::kLayout);
    out_.text(of.layout);
    out_.piece(piece::kCall);
    out_.byte(of.requires_grad ? op::kTrue : op::kFalse);
    out_.piece(piece::kMemoryFormat);
    out_.byte(of.memory_format);
    out_.piece(piece::kCall);
    out_.byte(of.pin_memory ? op::kTrue : op::kFalse);
    out_.byte(op::kTuple);
  }

  void files() {
    std::vector<bool> is_used(columns_.file_count());
    for (uint64_t item = 0; item < columns_.item_count(); ++item) {
      const uint32_t file = columns_.place(item).file;
      if (file >= is_used.size()) throw std::invalid_argument("nothing says where the items are");
      is_used[file] = true;
    }
    file_slots_.resize(is_used.size());
    auto next = static_cast<uint32_t>(columns_.properties_count());
    for (uint32_t file = 0; file < is_used.size(); ++file) {
      if (!is_used[file]) continue;
      file_slots_[file] = slot::variable(next++);
      out_.text(columns_.file_name(file));
      out_.put(file_slots_[file]);
      out_.byte(op::kPop);
      out_.cut();
    }
  }

  void object(uint32_t key) {
    out_.room(kOpcodesMax);
    out_.piece(piece::kKey);
    out_.text(columns_.name(key));
    out_.piece(piece::kObject);
    out_.piece(piece::kObjectIndex);
    place(columns_.first_item(key));
    out_.piece(piece::kObjectEnd);
    out_.cut();
  }

  void tensor(uint32_t key) {
    const size_t dims = columns_.dims(key);
    const int64_t* const size = columns_.size(key);
    out_.room(kOpcodesMax);
    out_.piece(piece::kKey);
    out_.text(columns_.name(key));
    out_.room(kOpcodesMax + dims * kNumberMax);
    out_.piece(piece::kTensor);
    out_.get(slot::variable(columns_.properties_of(key)));
    out_.piece(piece::kTensorSize);
    out_.size(size, dims);
    out_.piece(piece::kTensorEnd);
    out_.cut();
    const int64_t* written = size;
    const uint64_t count = columns_.items_of(key);
    for (uint64_t begin = 0; begin < count; begin += kChunkBatch) {
      const uint64_t end = std::min(count, begin + kChunkBatch);
      out_.room(kOpcodesMax);
      out_.piece(piece::kChunks);
      for (uint64_t chunk = begin; chunk < end; ++chunk) {
        out_.room(kOpcodesMax + 2 * dims * kNumberMax);
        out_.piece(piece::kChunk);
        out_.size(columns_.chunk_offsets(key, chunk), dims);
        out_.put(slot::kChunkOffsets + static_cast<uint32_t>(chunk - begin));
        out_.piece(piece::kChunkSizes);
        const int64_t* const sizes = columns_.chunk_sizes(key, chunk);
        if (std::equal(sizes, sizes + dims, written)) {
          out_.piece(piece::kSameSizes);
        } else {
          out_.size(sizes, dims);
          out_.piece(piece::kPutSizes);
          written = sizes;
        }
        out_.piece(piece::kChunkEnd);
      }
      out_.room(kOpcodesMax);
      out_.piece(piece::kChunksEnd);
      out_.piece(piece::kPlaces);
      for (uint64_t chunk = begin; chunk < end; ++chunk) {
        out_.room(kOpcodesMax);
        out_.piece(piece::kIndex);
        out_.number(chunk);
        out_.piece(piece::kIndexOffset);
        out_.byte(static_cast<uint8_t>(slot::kChunkOffsets + (chunk - begin)));
        out_.piece(piece::kIndexEnd);
        place(columns_.first_item(key) + chunk);
      }
      out_.room(kOpcodesMax);
      out_.piece(piece::kPlacesEnd);
      out_.cut();
    }
  }

  void place(uint64_t item) {
    const ItemPlace place = columns_.place(item);
    out_.room(kOpcodesMax);
    out_.piece(piece::kInfo);
    out_.get(file_slots_[place.file]);
    out_.piece(piece::kOffset);
    out_.number(place.offset);
    out_.piece(piece::kLength);
    out_.number(place.length);
    if (place.is_recorded) {
      out_.piece(piece::kCrc);
      out_.number(place.crc32);
      out_.piece(piece::kPayloadOffset);
      out_.number(place.payload_offset);
      out_.piece(piece::kPayloadLength);
      out_.number(place.payload_length);
      if (const std::vector<int64_t>* const stride = columns_.stride(item)) {
        out_.room(kOpcodesMax + stride->size() * kNumberMax);
        out_.piece(piece::kPayloadStride);
        out_.tuple(stride->data(), stride->size());
      }
    }
    out_.room(kOpcodesMax);
    out_.piece(piece::kInfoEnd);
  }

  void ending() {
    const std::array<std::string, 4> ending = metadata_ending(names_);
    literal(ending[0]);
    optional(extras_.checkpoint_id);
    literal(ending[1]);
    optional(extras_.save_id);
    literal(ending[2]);
    optional(extras_.version);
    literal(ending[3]);
  }

  void optional(const std::optional<std::string>& value) {
    if (value) return out_.text(*value);
    out_.room(kOpcodesMax);
    out_.byte(op::kNone);
  }

  const Columns& columns_;
  const MetadataNames& names_;
  const MetadataExtras& extras_;
  Frames out_;
  std::vector<uint32_t> file_slots_;
};

}  // namespace

MetadataSum encode_metadata(const Columns& columns, const MetadataNames& names,
                            const MetadataExtras& extras,
                            const std::function<void(std::string_view)>& write) {
  return Encoder(columns, names, extras, write).run();
}

}  // namespace pyckpt
