#include "bindings_tensor.h"

#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace pyckpt {

bool is_plain(const at::Tensor& tensor) {
  // Subclasses may be made of other tensors, and have no memory behind what they say of themselves.
  if (tensor.key_set().has(c10::DispatchKey::Python)) return false;
  // These have a size, and nothing behind it.
  if (tensor.key_set().has(c10::DispatchKey::ZeroTensor) ||
      tensor.key_set().has(c10::DispatchKey::Functionalize)) {
    return false;
  }
  const at::Device device = tensor.device();
  if (!device.is_cpu() && !device.is_cuda()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_conj() ||
      tensor.is_neg() || !tensor.has_storage()) {
    return false;
  }
  uint64_t end = tensor.numel() == 0 ? 0 : 1;  // in elements, from the tensor's first
  for (int64_t d = 0; end != 0 && d < tensor.dim(); ++d) {
    end += static_cast<uint64_t>(tensor.size(d) - 1) * static_cast<uint64_t>(tensor.stride(d));
  }
  if (end != 0) end += static_cast<uint64_t>(tensor.storage_offset());
  if (end * tensor.element_size() > tensor.storage().nbytes()) {
    throw std::invalid_argument(
        "the tensor is larger than its storage: its memory was freed (resize_(0)?)");
  }
  return true;
}

std::shared_ptr<Device> Programs::add(Engine& engine, const at::Tensor& tensor) {
  Stream stream = nullptr;
#ifdef PYCKPT_CUDA
  stream =
      c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(tensor.get_device())).stream();
#endif
  const auto same = [&](const Program& program) {
    return program.first->index() == tensor.get_device() && program.second == stream;
  };
  const auto found = std::find_if(all_.begin(), all_.end(), same);
  if (found != all_.end()) return found->first;
  all_.emplace_back(engine.cuda_device(static_cast<int>(tensor.get_device())), stream);
  return all_.back().first;
}

void Programs::follow() {
  if (followed_ == all_.size()) return;
  const CurrentDevice current_device(true);
  // The first use of a device takes long; and at any other the driver makes the thread wait, where
  // the program has queued more than it takes.
  const GilRelease release;
  for (; followed_ < all_.size(); ++followed_) {
    const auto& [device, stream] = all_[followed_];
    device->follow(stream);
  }
}

std::vector<Strided::Dimension> box_of(const at::Tensor& tensor,
                                       const std::optional<std::vector<int64_t>>& file_stride) {
  const auto dim = static_cast<size_t>(tensor.dim());
  if (file_stride && file_stride->size() != dim) {
    throw std::invalid_argument("file_stride must have as many entries as the tensor dimensions");
  }
  const uint64_t item_size = tensor.element_size();
  std::vector<Strided::Dimension> box(dim);
  uint64_t span = item_size;  // in the file, of the dimensions further in
  for (size_t d = dim; d-- > 0;) {
    const auto i = static_cast<int64_t>(d);
    box[d].size = static_cast<uint64_t>(tensor.size(i));
    box[d].memory_stride = static_cast<uint64_t>(tensor.stride(i)) * item_size;
    box[d].file_stride = span;
    if (file_stride && box[d].size > 1) {
      const int64_t stride = (*file_stride)[d];
      if (stride <= 0 || static_cast<uint64_t>(stride) > kFileMax / item_size ||
          static_cast<uint64_t>(stride) * item_size < span) {
        throw std::invalid_argument("each of file_stride must be as long as what is further in");
      }
      box[d].file_stride = static_cast<uint64_t>(stride) * item_size;
    }
    uint64_t before = 0;
    if (box[d].size > 0 && (__builtin_mul_overflow(box[d].size - 1, box[d].file_stride, &before) ||
                            __builtin_add_overflow(before, span, &span) || span > kFileMax)) {
      throw std::invalid_argument("file_stride reaches beyond the end of any file");
    }
  }
  return box;
}

}  // namespace pyckpt
