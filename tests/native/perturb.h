// Other schedules than the kernel's own: at locks and conditions, a thread now and then lets others
// go first, as often as a seed has it (PYCKPT_PERTURB_SEED). VARIANT=schedules builds with it.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace pyckpt::test {

inline void perturb() noexcept {
  static std::atomic<uint64_t> threads{0};
  static const uint64_t seed = [] {
    const char* const said = std::getenv("PYCKPT_PERTURB_SEED");
    return said == nullptr ? 0 : std::strtoull(said, nullptr, 10);
  }();
  // Each thread has numbers of its own, so that none waits for another to draw.
  static thread_local uint64_t state =
      (seed * 0x9e3779b97f4a7c15U) ^ ((threads.fetch_add(1) + 1) * 0xbf58476d1ce4e5b9U);
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  if ((state & 7) != 0) return;
  // Where other programs want the processor, each turn of theirs is some milliseconds, and a test
  // has 100,000s of these places. So a thread lets them have half of its time, and no more.
  using Clock = std::chrono::steady_clock;
  static thread_local Clock::time_point not_before;
  const Clock::time_point before = Clock::now();
  if (before < not_before) return;
  for (uint64_t turns = 1 + (state >> 8) % 4; turns != 0; --turns) ::sched_yield();
  const Clock::time_point after = Clock::now();
  if (after - before > std::chrono::microseconds(100)) not_before = after + (after - before);
}

}  // namespace pyckpt::test
