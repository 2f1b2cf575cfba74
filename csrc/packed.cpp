#include "packed.h"

#include "crc32.h"

namespace pyckpt {
namespace {

constexpr std::string_view kMagic = "pyckpt";
constexpr char kVersion = 1;
constexpr size_t kHeader = kMagic.size() + 2;
constexpr size_t kChecksum = sizeof(uint32_t);

}  // namespace

std::string seal(PackedKind kind, std::string_view body) {
  std::string sealed;
  sealed.reserve(kHeader + body.size() + kChecksum);
  sealed += kMagic;
  sealed += kVersion;
  sealed += static_cast<char>(kind);
  sealed += body;
  Packer checksum;
  checksum.word(crc32(0, sealed.data(), sealed.size()));
  return sealed += checksum.bytes();
}

PackedKind kind_of(std::string_view sealed) {
  if (sealed.size() < kHeader + kChecksum || sealed.substr(0, kMagic.size()) != kMagic) {
    throw std::invalid_argument("is not what pyckpt packs");
  }
  const std::string_view said = sealed.substr(sealed.size() - kChecksum);
  const uint32_t found = crc32(0, sealed.data(), sealed.size() - kChecksum);
  if (Unpacker(said).word() != found) {
    throw std::invalid_argument("is damaged: its checksum is not that of its bytes");
  }
  const char version = sealed[kMagic.size()];
  if (version != kVersion) {
    throw std::invalid_argument("is packed as version " + std::to_string(int{version}) +
                                ", and this pyckpt knows version " + std::to_string(int{kVersion}) +
                                ": all ranks need the same pyckpt");
  }
  return static_cast<PackedKind>(sealed[kMagic.size() + 1]);
}

std::string_view unseal(PackedKind kind, std::string_view sealed) {
  if (kind_of(sealed) != kind) throw std::invalid_argument("is something else that pyckpt packs");
  return sealed.substr(kHeader, sealed.size() - kHeader - kChecksum);
}

}  // namespace pyckpt
