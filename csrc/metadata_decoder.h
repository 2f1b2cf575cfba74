// Reads the pickle of `.metadata` into columns, without a Python object for each item.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "columns.h"
#include "metadata_form.h"

namespace pyckpt {

struct DecodedMetadata {
  std::shared_ptr<Columns> columns;
  MetadataExtras extras;
};

// Reads what encode_metadata writes, and nothing else: encoding what it returns makes the same
// bytes again. Nothing where the bytes are no such pickle, or say what no checkpoint can be loaded
// from (pyckpt/format/checks.py, but for its check of paths). Whoever made the bytes: it reads
// nothing beyond them, and takes memory and time in proportion to their number.
//
// `extras.planner_data` is a dict of strings to tuples of strings and whole numbers, or None.
std::optional<DecodedMetadata> decode_metadata(const std::byte* data, size_t size,
                                               const MetadataNames& names);

}  // namespace pyckpt
