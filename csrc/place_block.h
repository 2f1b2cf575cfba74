// Where a rank's items came to lie, as it tells the coordinator.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "columns.h"
#include "packed.h"

namespace pyckpt {

// An item as a WriteJob says where it lies, and what else is told of it.
struct PlacedItem {
  ItemPlace place;              // of a file whose number is not known here
  std::vector<int64_t> stride;  // empty: row-major
};

// All of the items, in the order of the plan.
std::string pack_places(const std::vector<PlacedItem>& items);

// Throws std::invalid_argument for bytes that are damaged.
std::vector<PlacedItem> unpack_places(std::string_view sealed);

// The checksums alone, of items that lie where they lay in a save before.
std::string pack_checksums(const std::vector<uint32_t>& checksums);
std::vector<uint32_t> unpack_checksums(std::string_view sealed);

}  // namespace pyckpt
