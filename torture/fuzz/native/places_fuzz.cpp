// What ranks say of where their items lie; and bytes that nobody sealed.
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz.h"
#include "packed.h"
#include "place_block.h"

namespace pyckpt {
namespace {

bool same(const std::vector<PlacedItem>& one, const std::vector<PlacedItem>& other) {
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i) {
    const ItemPlace &a = one[i].place, &b = other[i].place;
    if (a.offset != b.offset || a.length != b.length || a.is_recorded != b.is_recorded)
      return false;
    if (!a.is_recorded) continue;
    if (a.payload_offset != b.payload_offset || a.payload_length != b.payload_length ||
        a.crc32 != b.crc32 || one[i].stride != other[i].stride) {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace pyckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pyckpt;
  fuzz::Input input(data, size);
  const uint64_t how = input.below(3);
  const std::string body(input.rest());
  try {
    if (how == 0) {
      const auto items = unpack_places(seal(PackedKind::kPlaces, body));
      REQUIRE(same(items, unpack_places(pack_places(items))));
    } else if (how == 1) {
      const auto checksums = unpack_checksums(seal(PackedKind::kChecksums, body));
      REQUIRE(checksums == unpack_checksums(pack_checksums(checksums)));
    } else {
      kind_of(body);
      unseal(PackedKind::kPlan, body);
    }
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
