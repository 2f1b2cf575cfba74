// Copies that leave the cache to the program.
#pragma once

#include <cstddef>

namespace pyckpt {

// Copies to memory that nobody reads soon: the lines written are neither fetched before nor kept in
// the cache. Ordered before whatever the thread does next.
void copy_past_cache(std::byte* to, const std::byte* from, size_t size);

}  // namespace pyckpt
