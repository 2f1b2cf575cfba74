// Copies of several devices, made and waited for together.
#pragma once

#include <utility>
#include <vector>

#include "device.h"

namespace pyckpt {

// Not thread-safe. The devices must outlive it.
class TransferBatch {
 public:
  void add(Device* device, const Transfer& transfer);
  bool empty() const { return of_devices_.empty(); }

  // Make the copies and return when all of them are over, also those beside one that failed: then
  // nothing reads or writes the memory any more. Throw CudaError.
  void copy_to_host() { run(&Device::copy_to_host); }
  void copy_from_host() { run(&Device::copy_from_host); }

 private:
  using Copy = std::shared_ptr<Ticket> (Device::*)(const std::vector<Transfer>&);
  void run(Copy copy);

  std::vector<std::pair<Device*, std::vector<Transfer>>> of_devices_;
};

}  // namespace pyckpt
