// Runs the kernel of pack.h on a GPU and compares every byte: sizes and addresses that hurt, and
// more transfers than blocks. A program of its own, for scripts/gpu.sh and compute-sanitizer.
//
//   check_pack [rounds]
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device.h"
#include "pack.h"

namespace {

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

std::byte pattern(size_t i) { return static_cast<std::byte>((i * 2654435761u) >> 13); }

// Copies `count` pieces, of which the first begins at `skew`, from where it lies `shift` bytes
// further; returns how many bytes are wrong.
size_t wrong_bytes(size_t count, size_t skew, size_t shift, size_t apart) {
  const size_t sizes[] = {0, 1, 3, 4, 15, 16, 17, 4095, 4096, 4097, 32767, pyckpt::kPackChunk};
  std::vector<pyckpt::Transfer> transfers;
  std::vector<size_t> begins;
  size_t at = skew;
  for (size_t i = 0; i < count; ++i) {
    // Of the largest sizes few, so that all of it stays small.
    const size_t size = sizes[i % (i < 24 ? 12 : 9)];
    transfers.push_back({nullptr, nullptr, size});
    begins.push_back(at);
    at += size + apart;
  }
  const size_t total = at + 16;
  const size_t source_total = total + shift;

  std::vector<std::byte> source(source_total);
  for (size_t i = 0; i < source_total; ++i) source[i] = pattern(i);
  const std::byte* const expected = source.data() + shift;
  std::byte* device = nullptr;
  must(cudaMalloc(&device, source_total), "cudaMalloc");
  must(cudaMemcpy(device, source.data(), source_total, cudaMemcpyHostToDevice), "cudaMemcpy");
  std::byte* host = nullptr;
  must(cudaHostAlloc(&host, total, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  // What no transfer covers must stay as it is.
  const std::byte untouched{0xa5};
  std::memset(host, 0xa5, total);
  std::vector<bool> covered(total, false);
  for (size_t i = 0; i < count; ++i) {
    transfers[i].to = host + begins[i];
    transfers[i].from = device + shift + begins[i];
    for (size_t k = 0; k < transfers[i].size; ++k) covered[begins[i] + k] = true;
  }

  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  must(pyckpt::launch_pack(transfers.data(), count, stream), "launch_pack");
  must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  size_t wrong = 0;
  for (size_t i = 0; i < total; ++i) {
    wrong += host[i] != (covered[i] ? expected[i] : untouched);
  }
  must(cudaStreamDestroy(stream), "cudaStreamDestroy");
  must(cudaFreeHost(host), "cudaFreeHost");
  must(cudaFree(device), "cudaFree");
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  for (const size_t capacity : {pyckpt::kPackTransfersSmall, pyckpt::kPackTransfers}) {
    must(pyckpt::load_pack(capacity), "load_pack");
  }
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  size_t wrong = 0;
  size_t checked = 0;
  for (int round = 0; round < rounds; ++round) {
    for (const size_t count : {size_t{1}, size_t{33}, pyckpt::kPackTransfersSmall,
                               pyckpt::kPackTransfersSmall + 1, pyckpt::kPackTransfers}) {
      for (const size_t skew : {0, 1, 4, 16}) {
        // Each width at which the device can read what the host gets 16 bytes of at a time.
        for (const size_t shift : {0, 1, 2, 4, 8}) {
          for (const size_t apart : {0, 1, 16}) {
            wrong += wrong_bytes(count, skew, shift, apart);
            ++checked;
          }
        }
      }
    }
  }
  std::printf("pack kernel: %zu launches, %zu wrong bytes\n", checked, wrong);
  return wrong == 0 ? 0 : 1;
}
