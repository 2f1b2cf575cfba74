#include "transfer_batch.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace pyckpt {

void TransferBatch::add(Device* device, const Transfer& transfer) {
  const auto same = [&](const auto& of_device) { return of_device.first == device; };
  auto found = std::find_if(of_devices_.begin(), of_devices_.end(), same);
  if (found == of_devices_.end()) found = of_devices_.insert(found, {device, {}});
  found->second.push_back(transfer);
}

void TransferBatch::start(Copy copy) {
  const auto of_devices = std::exchange(of_devices_, {});
  tickets_.reserve(of_devices.size());
  try {
    for (const auto& [device, transfers] : of_devices) {
      tickets_.push_back((device->*copy)(transfers));
    }
  } catch (...) {
    try {
      wait();
    } catch (...) {
      // The first error is the one to tell of.
    }
    throw;
  }
}

void TransferBatch::wait() {
  std::exception_ptr error;
  for (const std::shared_ptr<Ticket>& ticket : tickets_) {
    try {
      ticket->wait();
    } catch (...) {
      error = std::current_exception();
    }
  }
  tickets_.clear();
  if (error) std::rethrow_exception(error);
}

}  // namespace pyckpt
