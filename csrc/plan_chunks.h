// Whether the chunks of a tensor that ranks are about to write are one tensor.
#pragma once

#include <string>
#include <vector>

#include "columns.h"

namespace pyckpt {

// Adds a line, with the key, for what DCP's _validate_global_plan refuses as well: a chunk that
// reaches out of the tensor, two that overlap (one of no elements counts as what it lies within),
// and, among several ranks, chunks that do not make up the whole. At most a few lines a key.
void check_chunks(const Columns& columns, uint32_t key, bool several_ranks,
                  std::vector<std::string>* refused);

}  // namespace pyckpt
