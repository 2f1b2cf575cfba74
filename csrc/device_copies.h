// The part of a staging that devices do: copies to the host, in the order of their queues.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "staged.h"

namespace pyckpt {

// How many bytes a device copies between two tickets, of so many in all: a writer can begin with
// the first while the others are on their way. Of a large state more, since each ticket is an entry
// in the device's queue, as a copy is: where that is full, the driver makes the thread wait.
constexpr uint64_t ticket_bytes(uint64_t total) {
  constexpr uint64_t kAtLeast = 16 << 20;
  constexpr uint64_t kTickets = 64;
  return std::max(kAtLeast, total / kTickets);
}

// Owns the list of copies, and of each device the ticket behind all of them. One thread adds and
// queues; after that, any may call what is const.
class DeviceCopies {
 public:
  void add(const StageSource& source, std::shared_ptr<Staged> staged) {
    copies_.push_back({source, std::move(staged)});
  }
  bool empty() const { return copies_.empty(); }

  // Gives a device its copies, those of guarded sources or the others. Throws CudaError.
  void queue(const std::shared_ptr<Device>& device, bool guarded);

  // What `stream` is given from now on waits, on the device, for the copies queued there so far.
  // Throws CudaError.
  void hold(const std::shared_ptr<Device>& device, Stream stream) const;

  // Waits for each copy. Throws the first error.
  void wait() const;

  // Until no device reads a source or writes to a region, whatever became of the copies.
  void wait_for_devices() const noexcept;

 private:
  std::vector<StageCopy> copies_;
  std::vector<std::pair<std::shared_ptr<Device>, std::shared_ptr<Ticket>>> newest_tickets_;
};

}  // namespace pyckpt
