// The memory of tensors that is read after the call that was given them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device.h"

namespace pyckpt {

// The memory that a storage on the host has now, whatever it is given later. Null where it cannot
// be kept.
std::shared_ptr<const void> share_memory(const c10::Storage& storage);

[[noreturn]] void throw_resized();

// Keeps memory of tensors while it lives. Used by one thread that Python knows; any other may
// destroy it.
class Sources {
 public:
  // Where a storage is `resizable`, the program may give it other memory while this lives, as FSDP
  // does between a save and the step. What torch allocated on the host is then kept, whatever the
  // program does. What it allocated on `device` goes to nobody before the copies that the device
  // was given by then are made.
  void add(const at::Tensor& tensor, const std::shared_ptr<Device>& device, bool resizable);

  // Throws where memory of a resizable storage could not be kept, and went.
  void check() const;

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
  std::vector<c10::Storage> storages_;
  std::vector<std::shared_ptr<const void>> memory_;
  std::vector<std::pair<c10::Storage, const void*>> watched_;
};

}  // namespace pyckpt
