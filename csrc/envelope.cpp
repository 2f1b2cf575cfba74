#include "envelope.h"

#include <stdexcept>

#include "crc32.h"

namespace pyckpt {
namespace {

constexpr size_t kHashDigits = 20;

void put_u32(char* to, uint32_t value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<char>(value >> (8 * i));
}

// c10::hash_combine (c10/util/hash.h), with which torch chains the checksums of the records.
uint64_t hash_combine(uint64_t seed, uint64_t value) {
  return seed ^ (value + 0x9e3779b9 + (seed << 6) + (seed >> 2));
}

void put_decimal(char* to, uint64_t value) {
  for (size_t i = kHashDigits; i-- > 0; value /= 10) to[i] = static_cast<char>('0' + value % 10);
}

}  // namespace

void Envelope::stamp(uint32_t crc, char* stamped) const {
  for (const uint32_t position : crc_positions) put_u32(stamped + position, crc);
  if (id_size == 0) return;

  uint64_t hash = 0;
  for (const uint32_t before : crcs_before) hash = hash_combine(hash, before);
  if (payload_size != 0) hash = hash_combine(hash, crc);  // torch leaves empty records out
  for (const uint32_t after : crcs_after) hash = hash_combine(hash, after);
  put_decimal(stamped + id_hash_position, hash);
  const uint32_t id_crc = crc32(0, stamped + id_position, id_size);
  for (const uint32_t position : id_crc_positions) put_u32(stamped + position, id_crc);
}

void Envelope::check() const {
  const auto fits = [this](uint64_t position, uint64_t size) {
    if (position + size > suffix.size()) throw std::out_of_range("a position lies past the suffix");
  };
  for (const uint32_t position : crc_positions) fits(position, 4);
  for (const uint32_t position : id_crc_positions) fits(position, 4);
  fits(id_position, id_size);
  if (id_size != 0) fits(id_hash_position, kHashDigits);
}

}  // namespace pyckpt
