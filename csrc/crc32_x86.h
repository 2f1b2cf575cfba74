// CRC-32 by carry-less multiplication.
#pragma once

#include <vector>

#include "crc32.h"

namespace pyckpt {

// The variants that this processor can run, the fastest first; none on other architectures.
std::vector<Crc32Variant> crc32_x86_variants();

}  // namespace pyckpt
