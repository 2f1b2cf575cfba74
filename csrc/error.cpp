#include "error.h"

#include <utility>

namespace pyckpt {

IoError::IoError(int error_number, std::string call, std::string path, std::string detail)
    : std::system_error(error_number, std::generic_category(), call + " " + path),
      path_(std::move(path)),
      message_(call + " failed: " + std::generic_category().message(error_number)) {
  if (!detail.empty()) message_ += " (" + detail + ")";
}

}  // namespace pyckpt
