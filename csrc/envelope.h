// The bytes that torch.save puts before and after the raw bytes of a tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pyckpt {

// Made once for a dtype, shape and strides (pyckpt/format/envelope.py says how), used for every
// tensor like it. Only a few bytes of the suffix depend on the tensor's values, all through their
// checksum: the zip's CRC fields, and the archive's serialization id. Immutable once made.
struct Envelope {
  std::string prefix;
  std::string suffix;
  uint64_t payload_size = 0;

  // Places in the suffix of the payload's CRC-32, 4 bytes little-endian.
  std::vector<uint32_t> crc_positions;

  // The serialization id is a record of decimal digits, 20 of which are a hash over the CRCs of all
  // records in turn; absent (id_size 0) where torch writes none. The record's own CRC changes with
  // it.
  uint32_t id_position = 0;
  uint32_t id_size = 0;
  uint32_t id_hash_position = 0;
  std::vector<uint32_t> id_crc_positions;
  std::vector<uint32_t> crcs_before;  // of the records before the payload's, in the file's order
  std::vector<uint32_t> crcs_after;   // of those between the payload's and the id

  // Writes into `suffix`, a copy of this->suffix, what a payload of checksum `crc` makes of it.
  void stamp(uint32_t crc, char* suffix) const;

  // Throws std::out_of_range where a position does not lie in the suffix.
  void check() const;
};

}  // namespace pyckpt
