#include "bindings_sources.h"

#include <c10/core/CPUAllocator.h>

#ifdef PYCKPT_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <stdexcept>

#include "bindings.h"
#include "bindings_tensor.h"
#include "mutex.h"

namespace pyckpt {
namespace {

void let_go(void* context) { delete static_cast<std::shared_ptr<at::DataPtr>*>(context); }

void keep_on_device([[maybe_unused]] const c10::Storage& storage,
                    [[maybe_unused]] const std::shared_ptr<Device>& device) {
#ifdef PYCKPT_CUDA
  // Torch remembers the stream for as long as it has the memory, and asks it when that is freed: so
  // it must not go with its engine.
  static auto* const kept = new std::unordered_set<std::shared_ptr<Device>>;
  static auto* const mutex = new Mutex;
  {
    const Lock lock(*mutex);
    kept->insert(device);
  }
  const CurrentDevice current_device(true);
  const auto index = static_cast<c10::DeviceIndex>(device->index());
  c10::cuda::CUDACachingAllocator::recordStream(
      storage.data_ptr(),
      c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(device->to_host()), index));
#endif
}

}  // namespace

// The storage shares its memory from then on, as one of several owners, and goes on doing so when
// the others are gone: by then another thread may be resizing it.
std::shared_ptr<const void> share_memory(const c10::Storage& storage) {
  // Two threads may save the same tensor. One process-wide mutex, as storages have none, and as
  // this takes less time than finding one of several would.
  static auto* const mutex = new Mutex;
  const Lock lock(*mutex);
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const at::DataPtr& memory = std::as_const(*impl).data_ptr();
  if (memory.get_deleter() == &let_go) {
    return *static_cast<const std::shared_ptr<at::DataPtr>*>(memory.get_context());
  }
  // Others are known by their deleters, or by what those are given: memory of several processes,
  // memory that is copied when it is written to, memory that is registered with CUDA.
  const c10::DeleterFnPtr plain = c10::GetCPUAllocator()->raw_deleter();
  if (plain == nullptr || memory.get_deleter() != plain) return nullptr;
  auto shared = std::make_shared<at::DataPtr>();
  auto context = std::make_unique<std::shared_ptr<at::DataPtr>>(shared);
  at::DataPtr share(memory.get(), context.release(), &let_go, memory.device());
  *shared = impl->set_data_ptr(std::move(share));
  return shared;
}

void throw_resized() {
  throw std::runtime_error(
      "a tensor's storage was resized while it was being saved: call wait_staged() before that");
}

void Sources::add(const at::Tensor& tensor, const std::shared_ptr<Device>& device, bool resizable) {
  const c10::Storage& storage = tensor.storage();
  const c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (!seen_.insert(impl).second) return;
  storages_.push_back(storage);
  if (!resizable) return;
  if (device) {
    keep_on_device(storage, device);
  } else if (std::shared_ptr<const void> memory = share_memory(storage)) {
    memory_.push_back(std::move(memory));
  } else {
    watched_.emplace_back(storage, impl->data_ptr().get());
  }
}

void Sources::check() const {
  for (const auto& [storage, data] : watched_) {
    const c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
    if (impl->data_ptr().get() == data) continue;
    throw_resized();
  }
}

}  // namespace pyckpt
