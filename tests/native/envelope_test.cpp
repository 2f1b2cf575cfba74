// What a payload's checksum changes in an envelope's suffix, byte by byte.
#include "envelope.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

std::string stamped(const Envelope& envelope, uint32_t crc) {
  std::string suffix = envelope.suffix;
  envelope.stamp(crc, suffix.data());
  return suffix;
}

// "....." 5, id of 22 characters whose last 20 are the hash, "....", the id's CRC, "."
Envelope with_id() {
  Envelope envelope;
  envelope.suffix = "aCCCC" + std::string("07") + std::string(20, '#') + "bcdeIIIIf";
  envelope.payload_size = 8;
  envelope.crc_positions = {1};
  envelope.id_position = 5;
  envelope.id_size = 22;
  envelope.id_hash_position = 7;
  envelope.id_crc_positions = {31};
  return envelope;
}

TEST(Envelope, TheChecksumIsLittleEndianAtEachPlace) {
  Envelope envelope;
  envelope.suffix = "0123456789abcdef";
  envelope.crc_positions = {0, 7, 12};
  EXPECT_EQ(stamped(envelope, 0x44434241), "ABCD456ABCDbABCD");
  EXPECT_EQ(stamped(envelope, 0xFF800001).substr(7, 4), (std::string{"\x01\x00\x80\xFF", 4}));
  EXPECT_EQ(envelope.suffix, "0123456789abcdef");  // itself it stays as it was
}

TEST(Envelope, NoPlacesNothingChanges) {
  Envelope envelope;
  envelope.suffix = "0123456789";
  EXPECT_EQ(stamped(envelope, 0x44434241), "0123456789");
}

// The numbers are c10::hash_combine's, computed by hand in Python over unbounded integers.
TEST(Envelope, TheIdHashesAllChecksumsInOrder) {
  Envelope envelope = with_id();
  envelope.crcs_before = {0x11111111, 0xFFFFFFFF};
  envelope.crcs_after = {0xCAFEBABE};
  const std::string suffix = stamped(envelope, 0x44434241);
  EXPECT_EQ(suffix.substr(0, 7), "aABCD07");
  EXPECT_EQ(suffix.substr(7, 20), "00000796704821131293");
  EXPECT_EQ(suffix.substr(27, 4), "bcde");
  EXPECT_EQ(suffix.substr(35), "f");
  const uint32_t id_crc = slow_crc32(suffix.substr(5, 22));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(static_cast<uint8_t>(suffix[31 + i]), id_crc >> (8 * i) & 0xFF) << i;
  }
}

TEST(Envelope, TheIdLeavesEmptyPayloadsOut) {
  Envelope envelope = with_id();
  envelope.crcs_before = {0x11111111};
  EXPECT_EQ(stamped(envelope, 0x00000001).substr(7, 20), "00000000189840802854");
  envelope.payload_size = 0;
  EXPECT_EQ(stamped(envelope, 0x00000001).substr(7, 20), "00000000002940766922");
}

TEST(Envelope, TheIdIsPaddedWithZeros) {
  EXPECT_EQ(stamped(with_id(), 0).substr(7, 20), "00000000002654435769");
}

TEST(Envelope, EveryPlaceMustLieInTheSuffix) {
  EXPECT_NO_THROW(with_id().check());
  EXPECT_NO_THROW(Envelope().check());

  const auto check = [](void (*change)(Envelope*)) {
    Envelope envelope = with_id();  // 36 bytes
    change(&envelope);
    envelope.check();
  };
  EXPECT_NO_THROW(check([](Envelope* e) { e->crc_positions = {32}; }));
  EXPECT_THROW(check([](Envelope* e) { e->crc_positions = {1, 33}; }), std::out_of_range);
  EXPECT_THROW(check([](Envelope* e) { e->crc_positions = {0xFFFFFFFF}; }), std::out_of_range);
  EXPECT_THROW(check([](Envelope* e) { e->id_crc_positions = {33}; }), std::out_of_range);
  EXPECT_THROW(check([](Envelope* e) { e->id_size = 32; }), std::out_of_range);
  EXPECT_THROW(check([](Envelope* e) { e->id_position = 0xFFFFFFFF; }), std::out_of_range);
  EXPECT_THROW(check([](Envelope* e) { e->id_hash_position = 17; }), std::out_of_range);
}

}  // namespace
}  // namespace pyckpt
