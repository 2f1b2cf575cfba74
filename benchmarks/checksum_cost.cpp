// Saves with the engine from memory, without Python, once for each path on standard input, and
// prints the seconds that each took and those that its threads spent checksumming. benchmarks/
// save.py builds it twice: as it is, and with NO_CHECKSUM, where every checksum is 0 for free.
//
//   checksum_cost TENSORS BYTES_OF_EACH
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "engine.h"

#ifdef NO_CHECKSUM
// In the place of crc32.cpp.
namespace pyckpt {
uint32_t crc32(uint32_t, const void*, size_t) { return 0; }
uint32_t crc32_portable(uint32_t, const void*, size_t) { return 0; }
uint32_t crc32_shift(uint32_t, uint64_t) { return 0; }
}  // namespace pyckpt
#endif

int main(int argc, char** argv) {
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
