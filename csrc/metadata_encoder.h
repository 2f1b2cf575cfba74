// Writes the pickle of `.metadata` from columns.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "columns.h"
#include "metadata_form.h"

namespace pyckpt {

// What was written: for the trailer.
struct MetadataSum {
  uint64_t bytes;
  uint32_t crc32;
};

// Writes the canonical form, in pieces. What it writes loads, in stock, as the objects of DCP that
// the columns stand for; files that no item is in are left out. Throws std::invalid_argument where
// nothing says where the items are, or what a dtype or layout is called.
MetadataSum encode_metadata(const Columns& columns, const MetadataNames& names,
                            const MetadataExtras& extras,
                            const std::function<void(std::string_view)>& write);

}  // namespace pyckpt
