#include "metadata_reader.h"

#include <algorithm>

namespace pyckpt {
namespace {

// Whether Python decodes these bytes.
bool is_utf8(const uint8_t* at, const uint8_t* end) {
  while (at != end) {
    if (*at < 0x80) {
      ++at;
      continue;
    }
    // The first byte tells how many follow, and what the first of those may be.
    size_t more;
    uint8_t low = 0x80, high = 0xbf;
    if (*at >= 0xc2 && *at <= 0xdf) {
      more = 1;
    } else if (*at >= 0xe0 && *at <= 0xef) {
      more = 2;
      if (*at == 0xe0) low = 0xa0;
      if (*at == 0xed) high = 0x9f;  // beyond are surrogates
    } else if (*at >= 0xf0 && *at <= 0xf4) {
      more = 3;
      if (*at == 0xf0) low = 0x90;
      if (*at == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    if (static_cast<size_t>(end - at) <= more || at[1] < low || at[1] > high) return false;
    for (size_t i = 2; i <= more; ++i) {
      if (at[i] < 0x80 || at[i] > 0xbf) return false;
    }
    at += more + 1;
  }
  return true;
}

// The dict of paths, as `MetadataReader` sees it. Strings and tuples are remembered, each with the
// next number, and recalled where they are met again.
class PlannerDataReader {
 public:
  PlannerDataReader(const uint8_t* begin, const uint8_t* end) : in_(begin, end) {}

  void run() {
    if (in_.peek() == op::kNone) {
      in_.byte();
    } else {
      in_.expect(op::kDict);
      remember(Kind::kDict);
      while (in_.left() != 0) entries();
    }
    in_.require(in_.left() == 0);
  }

 private:
  enum class Kind : uint8_t { kDict, kString, kTuple };

  void entries() {
    if (in_.peek() != op::kMark) {
      entry();
      in_.expect(op::kSetItem);
      return;
    }
    in_.byte();
    while (in_.peek() != op::kSetItems) entry();
    in_.byte();
  }

  void entry() {
    string();
    tuple();
  }

  bool is_recalled() const { return in_.peek() == op::kGet1 || in_.peek() == op::kGet4; }

  Kind recall() {
    const uint32_t number = in_.get();
    in_.require(number < remembered_.size());
    return remembered_[number];
  }

  void remember(Kind kind) {
    in_.require(in_.put() == remembered_.size());
    remembered_.push_back(kind);
  }

  void string() {
    if (is_recalled()) return in_.require(recall() == Kind::kString);
    in_.long_text();
    remember(Kind::kString);
  }

  void part() {
    if (is_recalled() || in_.peek() == op::kText4) {
      string();
    } else {
      in_.number();
    }
  }

  void tuple() {
    if (in_.peek() == op::kTuple0) {
      in_.byte();
      return;
    }
    if (in_.peek() == op::kMark) {
      in_.byte();
      while (in_.peek() != op::kTuple) part();
      in_.byte();
    } else {
      // What is recalled is the tuple, or the first part of one.
      size_t parts = 0;
      if (is_recalled()) {
        const Kind kind = recall();
        if (kind == Kind::kTuple) return;
        in_.require(kind == Kind::kString);
        ++parts;
      }
      while (in_.peek() < op::kTuple1 || in_.peek() > op::kTuple3) {
        part();
        in_.require(++parts <= 3);
      }
      in_.require(in_.byte() + size_t{1} == op::kTuple1 + parts);
    }
    remember(Kind::kTuple);
  }

  MetadataReader in_;
  std::vector<Kind> remembered_;
};

}  // namespace

std::string_view MetadataReader::text() {
  if (peek() == op::kText1) {
    byte();
    return utf8(byte());
  }
  const std::string_view value = long_text();
  require(value.size() > UINT8_MAX);
  return value;
}

std::string_view MetadataReader::long_text() {
  expect(op::kText4);
  return utf8(little_endian(4));
}

std::string_view MetadataReader::utf8(uint64_t size) {
  const uint8_t* const begin = take(size);
  require(is_utf8(begin, at_));
  return {reinterpret_cast<const char*>(begin), size};
}

bool is_plain_planner_data(const uint8_t* data, size_t size) {
  try {
    PlannerDataReader(data, data + size).run();
    return true;
  } catch (const NotCanonical&) {
    return false;
  }
}

}  // namespace pyckpt
