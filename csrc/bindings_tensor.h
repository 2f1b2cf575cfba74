// What is asked of tensors, and of the devices that they are on, before the engine is given their
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_device.h"
#include "device.h"
#include "engine.h"
#include "staged.h"
#include "strided.h"

namespace pyckpt {

// Where the bytes of any file end.
constexpr uint64_t kFileMax = std::numeric_limits<int64_t>::max();

// Whether the tensor is memory and nothing more: its bytes, as they lie, are its values. Throws
// std::invalid_argument where the memory is not there.
bool is_plain(const at::Tensor& tensor);

// A device, and a stream there that the program gives its work to.
using Program = std::pair<std::shared_ptr<Device>, Stream>;

// The devices of some tensors, with the streams that were current as each was added.
class Programs {
 public:
  // The engine's device of a CUDA tensor.
  std::shared_ptr<Device> add(Engine& engine, const at::Tensor& tensor);

  // What the streams were given so far, copies made from now on see. Once a stream, however many
  // tensors there are. Without the GIL, where a stream is new.
  void follow();

  const std::vector<Program>& all() const { return all_; }

 private:
  std::vector<Program> all_;
  size_t followed_ = 0;  // the first ones
};

// The copy that is the memory of a tensor handed out by a staging; null for other tensors.
std::shared_ptr<Staged> staged_of(const at::Tensor& tensor);

// Where the elements of a tensor stand, in its memory and in a file. In the file they have the
// strides `file_stride` (in elements), or follow one another in row-major order. Throws
// std::invalid_argument for strides that cannot be.
std::vector<Strided::Dimension> box_of(const at::Tensor& tensor,
                                       const std::optional<std::vector<int64_t>>& file_stride);

}  // namespace pyckpt
