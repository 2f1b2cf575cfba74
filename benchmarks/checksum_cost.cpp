// Saves with the engine from memory, without Python, once for each path on standard input, and
// prints the seconds that each took and those that its threads spent checksumming. benchmarks/
// save.py builds it twice: as it is, and with NO_CHECKSUM, where every checksum is 0 for free.
//
//   checksum_cost TENSORS BYTES_OF_EACH
//
// Or prints, for each variant of the checksum that this processor can run, how fast it copies and
// checksums 512 MiB between memory and a ring of slots, in GB/s, beside what memcpy alone does:
//
//   checksum_cost loops
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "crc32.h"
#include "engine.h"

#ifdef NO_CHECKSUM
// In the place of crc32.cpp and crc32_x86.cpp. Copies are copies still.
namespace pyckpt {
uint32_t crc32(uint32_t, const void*, size_t) { return 0; }
uint32_t copy_crc32(uint32_t, void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return 0;
}
uint32_t copy_crc32_past_cache(uint32_t crc, void* to, const void* from, size_t size) {
  return copy_crc32(crc, to, from, size);
}
const std::vector<Crc32Variant>& crc32_variants() {
  static const std::vector<Crc32Variant> none;
  return none;
}
uint32_t crc32_shift(uint32_t, uint64_t) { return 0; }
}  // namespace pyckpt
#endif

namespace {

constexpr size_t kSlot = 2 << 20, kSlots = 12, kState = 512 << 20;

// The median of nine rounds over a state, a slot at a time. `step` is given a place in the state
// and one in the ring.
template <typename Step>
void time_loop(const char* name, const char* what, Step step) {
  static std::vector<char> state(kState, 1), ring(kSlots * kSlot, 2);
  std::vector<double> seconds;
  for (int round = 0; round < 9; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t at = 0; at < kState; at += kSlot)
      step(&state[at], &ring[at / kSlot % kSlots * kSlot]);
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    seconds.push_back(passed.count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + 4, seconds.end());
  std::printf("%-10s %-34s %6.2f\n", name, what, kState / seconds[4] / 1e9);
}

void time_loops() {
  time_loop("memcpy", "memory to slots",
            [](char* state, char* slot) { std::memcpy(slot, state, kSlot); });
  time_loop("memcpy", "slots to memory",
            [](char* state, char* slot) { std::memcpy(state, slot, kSlot); });
  for (const pyckpt::Crc32Variant& variant : pyckpt::crc32_variants()) {
    volatile uint32_t crc = 0;  // so that it is computed
    time_loop(variant.name, "checksum of what is in the cache", [&](char*, char*) {
      static char block[128 << 10];
      for (size_t at = 0; at < kSlot; at += sizeof(block)) {
        crc = variant.crc32(crc, block, sizeof(block));
      }
    });
    time_loop(variant.name, "checksum of memory",
              [&](char* state, char*) { crc = variant.crc32(crc, state, kSlot); });
    time_loop(variant.name, "memory to slots",
              [&](char* state, char* slot) { crc = variant.copy(crc, slot, state, kSlot); });
    time_loop(variant.name, "memory to slots, past the cache", [&](char* state, char* slot) {
      crc = variant.copy_past_cache(crc, slot, state, kSlot);
    });
    time_loop(variant.name, "slots to memory",
              [&](char* state, char* slot) { crc = variant.copy(crc, state, slot, kSlot); });
    time_loop(variant.name, "slots to memory, past the cache", [&](char* state, char* slot) {
      crc = variant.copy_past_cache(crc, state, slot, kSlot);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "loops") == 0) {
    time_loops();
    return 0;
  }
  if (argc != 3) return 2;
  const size_t count = std::strtoull(argv[1], nullptr, 10);
  const size_t size = std::strtoull(argv[2], nullptr, 10);
  std::vector<pyckpt::Source> sources(count);
  for (size_t i = 0; i < count; ++i) {
    // As torch allocates: 64 bytes is all the alignment there is to rely on.
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size) != 0) return 3;
    std::memset(memory, static_cast<int>(i + 1), size);
    sources[i].data = static_cast<std::byte*>(memory);
    sources[i].size = size;
  }
  pyckpt::Engine engine{pyckpt::EngineOptions{}};
  pyckpt::WriteOptions options;
  options.preallocate = count * (size + 4096);
  std::string path;
  std::puts("ready");
  std::fflush(stdout);
  while (std::getline(std::cin, path)) {
    auto job = engine.start_write(path, options);
    for (const pyckpt::Source& source : sources) job->add(nullptr, source);
    job->finish();
    const pyckpt::WriteStatistics done = job->statistics();
    std::printf("%.9f %.9f %.9f %.9f\n", done.seconds, done.copy_seconds, done.checksum_seconds,
                done.write_seconds);
    std::fflush(stdout);
  }
  return 0;
}
