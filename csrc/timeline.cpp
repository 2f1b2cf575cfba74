#include "timeline.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <new>
#include <utility>

#include "mutex.h"

namespace pyckpt {
namespace {

// Written by one thread. Another may read what was published, at any time.
class Track {
 public:
  Track() : thread_(static_cast<pid_t>(::syscall(SYS_gettid))) {
    char name[16] = "";  // the kernel's limit
    pthread_getname_np(pthread_self(), name, sizeof name);
    name_ = name;
  }
  Track(const Track&) = delete;
  Track& operator=(const Track&) = delete;
  ~Track() {
    // By a loop: a destructor that went on by itself would go as deep as there are chunks.
    for (Chunk* chunk = first_.next.load(); chunk != nullptr;) {
      const std::unique_ptr<Chunk> dead(chunk);
      chunk = dead->next.load();
    }
  }

  void add(const TimelineSpan& span) {
    if (size_ == Timeline::kMaxSpans) {
      drop();
      return;
    }
    const size_t at = size_ % kChunk;
    if (at == 0 && size_ != 0) {
      Chunk* const next = new Chunk;
      last_->next.store(next, std::memory_order_release);
      last_ = next;
    }
    last_->spans[at] = span;
    ++size_;
    last_->count.store(at + 1, std::memory_order_release);
  }

  void drop() noexcept { dropped_.fetch_add(1, std::memory_order_relaxed); }

  TimelineTrack read() const {
    TimelineTrack track{thread_, name_, {}, dropped_.load(std::memory_order_relaxed)};
    const Chunk* chunk = &first_;
    while (chunk != nullptr) {
      const size_t count = chunk->count.load(std::memory_order_acquire);
      track.spans.insert(track.spans.end(), chunk->spans.begin(), chunk->spans.begin() + count);
      chunk = chunk->next.load(std::memory_order_acquire);
    }
    return track;
  }

 private:
  static constexpr size_t kChunk = 512;

  struct Chunk {
    std::array<TimelineSpan, kChunk> spans;
    std::atomic<size_t> count{0};  // of the spans that may be read
    std::atomic<Chunk*> next{nullptr};
  };

  const pid_t thread_;
  std::string name_;
  Chunk first_;
  Chunk* last_ = &first_;
  size_t size_ = 0;
  std::atomic<uint64_t> dropped_{0};
};

struct Recorder {
  Mutex mutex;
  uint64_t number GUARDED_BY(mutex) = 0;  // of the recording that runs; 0: none does
  std::vector<std::shared_ptr<Track>> tracks GUARDED_BY(mutex);
};

std::atomic<uint64_t> recordings{0};  // that were begun

// Never freed: threads may end after static objects do.
std::atomic<Recorder*> recorder{new Recorder};

// What a thread remembers of its track, which the recorder owns: once that has let go of it, its
// memory is freed, though the thread may live on.
struct OwnTrack {
  uint64_t recording = 0;
  std::weak_ptr<Track> track;
};
thread_local OwnTrack own;

// The calling thread's track of that recording, made at its first span; null if the recording has
// ended.
std::shared_ptr<Track> own_track(uint64_t recording) {
  if (own.recording == recording) return own.track.lock();
  auto track = std::make_shared<Track>();
  Recorder* const all = recorder.load();
  const Lock lock(all->mutex);
  own.recording = recording;
  own.track.reset();
  if (all->number != recording) return nullptr;
  all->tracks.push_back(track);
  own.track = track;
  return track;
}

}  // namespace

std::atomic<uint64_t> Timeline::recording_{0};

// A forked child has one of the threads, and another may have held the mutex. So it has a recorder
// of its own, and records nothing until it begins to.
const int Timeline::fork_handler_ = pthread_atfork(nullptr, nullptr, [] {
  recording_.store(0, std::memory_order_relaxed);
  recorder.store(new Recorder);
});

bool Timeline::start() {
  Recorder* const all = recorder.load();
  const Lock lock(all->mutex);
  if (all->number != 0) return false;
  all->number = recordings.fetch_add(1) + 1;
  recording_.store(all->number, std::memory_order_relaxed);
  return true;
}

std::vector<TimelineTrack> Timeline::stop() {
  Recorder* const all = recorder.load();
  std::vector<std::shared_ptr<Track>> tracks;
  {
    const Lock lock(all->mutex);
    recording_.store(0, std::memory_order_relaxed);
    all->number = 0;
    tracks.swap(all->tracks);
  }
  std::vector<TimelineTrack> read;
  for (const std::shared_ptr<Track>& track : tracks) read.push_back(track->read());
  return read;
}

void Timeline::add(uint64_t recording, const TimelineSpan& span) noexcept {
  try {
    const std::shared_ptr<Track> track = own_track(recording);
    if (!track) return;
    try {
      track->add(span);
    } catch (const std::bad_alloc&) {
      track->drop();
    }
  } catch (...) {
    // There is no memory, or no track: a recording must not fail what it watches.
  }
}

}  // namespace pyckpt
