#include "pack_kernel.cuh"

namespace pyckpt {

const void* small_pack_kernel() {
  return reinterpret_cast<const void*>(&pack<kPackTransfersSmall>);
}

}  // namespace pyckpt
