#include "transfer_batch.h"

#include <algorithm>
#include <exception>

namespace pyckpt {

void TransferBatch::add(Device* device, const Transfer& transfer) {
  const auto same = [&](const auto& of_device) { return of_device.first == device; };
  auto found = std::find_if(of_devices_.begin(), of_devices_.end(), same);
  if (found == of_devices_.end()) found = of_devices_.insert(found, {device, {}});
  found->second.push_back(transfer);
}

void TransferBatch::run(Copy copy) {
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::exception_ptr error;
  for (const auto& [device, transfers] : of_devices_) {
    try {
      tickets.push_back((device->*copy)(transfers));
    } catch (...) {
      error = std::current_exception();
    }
  }
  for (const std::shared_ptr<Ticket>& ticket : tickets) {
    try {
      ticket->wait();
    } catch (...) {
      error = std::current_exception();
    }
  }
  of_devices_.clear();
  if (error) std::rethrow_exception(error);
}

}  // namespace pyckpt
