// Names for what threads do, in the timelines of Nsight Systems and other tools.
#pragma once

#include <cstdint>

#if __has_include(<nvtx3/nvToolsExt.h>)
#define PYCKPT_NVTX
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pyckpt {

#ifdef PYCKPT_NVTX

inline nvtxDomainHandle_t nvtx_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("pyckpt");
  return domain;
}

// A range of the calling thread, from here to the end of the block; costs a few nanoseconds where
// no tool listens. `name` must stay.
class NvtxRange {
 public:
  NvtxRange(const char* name, uint64_t bytes) {
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = bytes;
    nvtxDomainRangePushEx(nvtx_domain(), &attributes);
  }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange() { nvtxDomainRangePop(nvtx_domain()); }
};

inline void name_nvtx_thread(const char* name) {
  nvtxNameOsThreadA(static_cast<uint32_t>(::syscall(SYS_gettid)), name);
}

#else

class NvtxRange {
 public:
  NvtxRange(const char*, uint64_t) {}
};

inline void name_nvtx_thread(const char*) {}

#endif

}  // namespace pyckpt
