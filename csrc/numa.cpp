#include "numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <fstream>

namespace pyckpt {
namespace {

// More nodes than a kernel can be built for.
constexpr size_t kNodes = 1024;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;

}  // namespace

int node_of_pci_device(const std::string& address, const std::string& system) {
  // A list of ranges: "0" is one node, "0-1" and "0,2" are several.
  std::string online;
  std::ifstream(system + "/devices/system/node/online") >> online;
  if (online.find_first_of("-,") == std::string::npos) return -1;
  if (address.empty()) return -1;
  int node = -1;
  std::ifstream(system + "/bus/pci/devices/" + address + "/numa_node") >> node;
  return node;
}

void prefer_node(void* memory, size_t size, int node) noexcept {
  if (node < 0 || static_cast<size_t>(node) >= kNodes) return;
  unsigned long nodes[kNodes / kWordBits] = {};
  nodes[static_cast<size_t>(node) / kWordBits] |= 1ul << (static_cast<size_t>(node) % kWordBits);
  // The kernel takes one bit less than it is told.
  static_cast<void>(::syscall(SYS_mbind, memory, size, MPOL_PREFERRED, nodes, kNodes + 1, 0));
}

}  // namespace pyckpt
