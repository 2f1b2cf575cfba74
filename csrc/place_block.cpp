#include "place_block.h"

namespace pyckpt {
namespace {

enum : uint8_t { kNotRecorded, kRecorded, kWithStride };
constexpr uint64_t kDimsMax = 64;

}  // namespace

std::string pack_places(const std::vector<PlacedItem>& items) {
  Packer body;
  body.number(uint64_t{items.size()});
  uint64_t end = 0;  // of the item before: the next begins there, or a little later
  for (const PlacedItem& item : items) {
    const ItemPlace& place = item.place;
    body.byte(!place.is_recorded ? kNotRecorded : item.stride.empty() ? kRecorded : kWithStride);
    body.number(place.offset - end);
    body.number(place.length);
    end = place.offset + place.length;
    if (!place.is_recorded) continue;
    body.number(place.payload_offset);
    body.number(place.length - place.payload_length);
    body.word(place.crc32);
    if (item.stride.empty()) continue;
    body.number(uint64_t{item.stride.size()});
    for (const int64_t stride : item.stride) body.number(stride);
  }
  return seal(PackedKind::kPlaces, body.bytes());
}

std::vector<PlacedItem> unpack_places(std::string_view sealed) {
  Unpacker from(unseal(PackedKind::kPlaces, sealed));
  std::vector<PlacedItem> items(from.count());
  uint64_t end = 0;
  for (PlacedItem& item : items) {
    const uint8_t kind = from.byte();
    if (kind > kWithStride) Unpacker::fail();
    ItemPlace& place = item.place;
    place.offset = end + from.number();
    place.length = from.number();
    end = place.offset + place.length;
    place.is_recorded = kind != kNotRecorded;
    if (!place.is_recorded) continue;
    place.payload_offset = from.number();
    place.payload_length = place.length - from.number();
    place.crc32 = from.word();
    if (kind != kWithStride) continue;
    const uint64_t dims = from.number();
    if (dims == 0 || dims > kDimsMax) Unpacker::fail();
    item.stride.resize(dims);
    for (int64_t& stride : item.stride) stride = from.signed_number();
  }
  from.end();
  return items;
}

std::string pack_checksums(const std::vector<uint32_t>& checksums) {
  Packer body;
  body.number(uint64_t{checksums.size()});
  for (const uint32_t checksum : checksums) body.word(checksum);
  return seal(PackedKind::kChecksums, body.bytes());
}

std::vector<uint32_t> unpack_checksums(std::string_view sealed) {
  Unpacker from(unseal(PackedKind::kChecksums, sealed));
  std::vector<uint32_t> checksums(from.count());
  for (uint32_t& checksum : checksums) checksum = from.word();
  from.end();
  return checksums;
}

}  // namespace pyckpt
