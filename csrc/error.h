// How the engine reports failure: exceptions, one class a cause.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace pyckpt {

// A system call failed. Carries what a person needs to find out why: the call, the file, and where
// in it.
class IoError : public std::system_error {
 public:
  // `call` is the name of the system call, `detail` what it was doing ("8192 bytes at offset
  // 4096"), may be empty.
  IoError(int error_number, std::string call, std::string path, std::string detail = "");

  int error_number() const { return code().value(); }
  const std::string& path() const { return path_; }
  // "write failed: No space left on device (8192 bytes at offset 4096)"
  const std::string& message() const { return message_; }

 private:
  std::string path_;
  std::string message_;
};

// The engine was closed while, or before, it was asked for something.
class EngineClosed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A CUDA runtime call failed.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace pyckpt
