#include "device_copies.h"

#include <algorithm>

namespace pyckpt {
void DeviceCopies::queue(const std::shared_ptr<Device>& device, bool guarded) {
  std::vector<Transfer> transfers;
  std::vector<Staged*> targets;
  uint64_t total = 0;  // guarded or not, so that the device's tickets are as many either way
  for (const StageCopy& copy : copies_) {
    if (copy.source.device == device) total += copy.source.size;
  }
  uint64_t bytes = 0;
  const auto flush = [&] {
    if (transfers.empty()) return;
    const std::shared_ptr<Ticket> ticket = device->copy_to_host(transfers);
    const auto same = [&](const auto& newest) { return newest.first == device; };
    const auto newest = std::find_if(newest_tickets_.begin(), newest_tickets_.end(), same);
    if (newest == newest_tickets_.end()) {
      newest_tickets_.emplace_back(device, ticket);
    } else {
      newest->second = ticket;
    }
    for (Staged* staged : targets) staged->ticket_ = ticket;
    transfers.clear();
    targets.clear();
    bytes = 0;
  };
  for (const StageCopy& copy : copies_) {
    if (copy.source.device != device || copy.source.guarded != guarded) continue;
    transfers.push_back({copy.staged->data(), copy.source.data, copy.source.size});
    targets.push_back(copy.staged.get());
    bytes += copy.source.size;
    if (bytes >= ticket_bytes(total)) flush();
  }
  flush();
}

void DeviceCopies::hold(const std::shared_ptr<Device>& device, Stream stream) const {
  for (const auto& [of, ticket] : newest_tickets_) {
    if (of == device) device->hold(stream, *ticket);
  }
}

void DeviceCopies::wait() const {
  for (const StageCopy& copy : copies_) copy.staged->wait();
}

void DeviceCopies::wait_for_devices() const noexcept {
  for (const auto& [device, ticket] : newest_tickets_) {
    try {
      ticket->wait();
    } catch (...) {
      // A device that failed copies no more; whoever waits for its copies is told by their tickets.
    }
  }
}

}  // namespace pyckpt
