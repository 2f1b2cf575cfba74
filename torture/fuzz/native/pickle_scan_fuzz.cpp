// Any bytes as a pickle: the scan ends, and says the same of what it says is the whole pickle.
#include <stdexcept>

#include "fuzz.h"
#include "pickle_scan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pyckpt;
  constexpr PickleLimits kLimits{100, 64};
  const auto bytes = fuzz::copied({reinterpret_cast<const char*>(data), size});
  size_t found = 0;
  try {
    found = scan_pickle(bytes.data(), bytes.size(), kLimits);
  } catch (const std::invalid_argument&) {
    return 0;
  }
  REQUIRE(found > 0 && found <= size);
  REQUIRE(bytes[found - 1] == std::byte{'.'});
  const auto whole = fuzz::copied({reinterpret_cast<const char*>(data), found});
  try {
    REQUIRE(scan_pickle(whole.data(), whole.size(), kLimits) == found);
  } catch (const std::invalid_argument&) {
    // The limit of work is by the bytes that are there: what was cut off had paid for it.
    REQUIRE(found < size);
  }
  return 0;
}
