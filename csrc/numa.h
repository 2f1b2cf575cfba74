// On which of several NUMA nodes memory lies.
#pragma once

#include <cstddef>
#include <string>

namespace pyckpt {

// The node that a PCI device ("0000:3b:00.0") is attached to; -1 where there is one node alone, or
// the system does not say. `system` is where its tree of devices is mounted.
int node_of_pci_device(const std::string& address, const std::string& system = "/sys");

// Asks that pages of the range that are not there yet come from that node, or from another where it
// is full. A wish: where it is not granted, nothing but speed is lost.
void prefer_node(void* memory, size_t size, int node) noexcept;

}  // namespace pyckpt
