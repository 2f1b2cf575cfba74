#include "pack_kernel.cuh"

namespace pyckpt {

const void* large_pack_kernel() { return reinterpret_cast<const void*>(&pack<kPackTransfers>); }

}  // namespace pyckpt
