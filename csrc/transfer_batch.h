// Copies of several devices, made and waited for together.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "device.h"

namespace pyckpt {

// Not thread-safe. The devices must outlive it.
class TransferBatch {
 public:
  void add(Device* device, const Transfer& transfer);
  bool empty() const { return of_devices_.empty(); }

  // Queue the copies. After an error none of them is under way, also not those beside the one that
  // failed. Throw CudaError.
  void start_to_host() { start(&Device::copy_to_host); }
  void start_from_host() { start(&Device::copy_from_host); }

  // Returns when what was started is over, also what is beside one that failed: then nothing reads
  // or writes the memory any more. Throws CudaError.
  void wait();

 private:
  using Copy = std::shared_ptr<Ticket> (Device::*)(const std::vector<Transfer>&);
  void start(Copy copy);

  std::vector<std::pair<Device*, std::vector<Transfer>>> of_devices_;
  std::vector<std::shared_ptr<Ticket>> tickets_;
};

}  // namespace pyckpt
