// Recordings: what is in them, while threads write and others read, and in a forked child.
#include "timeline.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "io_threads.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

size_t count(const std::vector<TimelineTrack>& tracks) {
  size_t spans = 0;
  for (const TimelineTrack& track : tracks) spans += track.spans.size();
  return spans;
}

TEST(Timeline, RecordsWhatEndsBetweenStartAndStop) {
  { const Span before("before", 1); }
  ASSERT_TRUE(Timeline::start());
  EXPECT_FALSE(Timeline::start());  // one at a time
  {
    const Span outer("outer", 2);
    const Span inner("inner", 3);
  }
  std::vector<TimelineTrack> tracks;
  {
    const Span open("open", 4);
    tracks = Timeline::stop();
  }
  { const Span after("after", 5); }

  ASSERT_EQ(tracks.size(), 1u);
  EXPECT_EQ(tracks[0].thread, ::gettid());
  EXPECT_EQ(tracks[0].dropped, 0u);
  const std::vector<TimelineSpan>& spans = tracks[0].spans;
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_STREQ(spans[0].name, "inner");
  EXPECT_STREQ(spans[1].name, "outer");
  EXPECT_EQ(spans[0].bytes, 3u);
  EXPECT_EQ(spans[1].bytes, 2u);
  EXPECT_LE(spans[1].begin_ns, spans[0].begin_ns);
  EXPECT_LE(spans[0].begin_ns, spans[0].end_ns);
  EXPECT_LE(spans[0].end_ns, spans[1].end_ns);
  EXPECT_TRUE(Timeline::stop().empty());
}

// A span that begins in one recording and ends in the next belongs to neither.
TEST(Timeline, RecordingsDoNotMix) {
  ASSERT_TRUE(Timeline::start());
  {
    const Span across("across", 0);
    EXPECT_EQ(count(Timeline::stop()), 0u);
    ASSERT_TRUE(Timeline::start());
  }
  { const Span own("own", 0); }
  const std::vector<TimelineTrack> tracks = Timeline::stop();
  ASSERT_EQ(count(tracks), 1u);
  EXPECT_STREQ(tracks[0].spans[0].name, "own");
}

TEST(Timeline, EachThreadHasItsTrackAndName) {
  constexpr size_t kThreads = 4, kSpans = 3000;  // several chunks
  ASSERT_TRUE(Timeline::start());
  {
    std::atomic<size_t> arrived{0};
    Gate all;
    IoThreads threads(kThreads, "test-track");  // ends first: it uses the others
    for (size_t i = 0; i < kThreads; ++i) {
      threads.submit([&] {
        if (arrived.fetch_add(1) + 1 == kThreads) all.open();
        all.wait();
        for (size_t n = 0; n < kSpans; ++n) const Span span("work", n);
      });
    }
  }  // the threads are gone, and what they did is not
  const std::vector<TimelineTrack> tracks = Timeline::stop();
  ASSERT_EQ(tracks.size(), kThreads);
  for (const TimelineTrack& track : tracks) {
    EXPECT_EQ(track.name.rfind("test-track-", 0), 0u) << track.name;
    ASSERT_EQ(track.spans.size(), kSpans);
    for (size_t n = 0; n < kSpans; ++n) ASSERT_EQ(track.spans[n].bytes, n);
  }
}

TEST(Timeline, ThereIsAnEndToWhatAThreadRecords) {
  ASSERT_TRUE(Timeline::start());
  const uint64_t recording = Timeline::recording();
  for (size_t n = 0; n < Timeline::kMaxSpans + 5; ++n) Timeline::add(recording, {"s", 0, 0, n});
  const std::vector<TimelineTrack> tracks = Timeline::stop();
  ASSERT_EQ(tracks.size(), 1u);
  EXPECT_EQ(tracks[0].spans.size(), Timeline::kMaxSpans);
  EXPECT_EQ(tracks[0].dropped, 5u);
}

// For the thread sanitizer: recordings begin and end while threads are in the middle of spans.
TEST(Timeline, BeginsAndEndsWhileThreadsWork) {
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = 0; !done.load(std::memory_order_relaxed); ++n) {
        const Span outer("outer", n);
        const Span inner("inner", n);
      }
    });
  }
  size_t recorded = 0;
  while (recorded < 20000) {
    ASSERT_TRUE(Timeline::start());
    std::this_thread::yield();
    for (const TimelineTrack& track : Timeline::stop()) {
      recorded += track.spans.size();
      for (const TimelineSpan& span : track.spans) ASSERT_LE(span.begin_ns, span.end_ns);
      for (size_t i = 1; i < track.spans.size(); ++i) {
        ASSERT_LE(track.spans[i - 1].end_ns, track.spans[i].end_ns);
      }
    }
  }
  done.store(true);
  for (std::thread& thread : threads) thread.join();
}

TEST(Timeline, AForkedChildRecordsForItself) {
  ASSERT_TRUE(Timeline::start());
  { const Span span("parent", 0); }
  const pid_t child = ::fork();
  if (child == 0) {
    bool right = Timeline::recording() == 0;
    { const Span span("unseen", 0); }
    right = right && Timeline::start();
    { const Span span("child", 0); }
    const std::vector<TimelineTrack> tracks = Timeline::stop();
    right = right && count(tracks) == 1 && tracks[0].spans[0].name == std::string("child");
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(count(Timeline::stop()), 1u);
}

// What the threads of an engine do in a write, by its own statistics.
TEST(Timeline, HasTheLapsOfAJob) {
  TempDirectory directory;
  Engine engine({/*slot_bytes=*/64 << 10, /*slots=*/2, /*io_threads=*/2, /*arena_bytes=*/0});
  Random random(1);
  const std::string payload = random_bytes(random, 1 << 20);
  auto envelope = std::make_shared<Envelope>();
  envelope->payload_size = payload.size();
  ASSERT_TRUE(Timeline::start());
  WriteOptions options;
  options.direct = Direct::kOff;
  const std::shared_ptr<WriteJob> job = engine.start_write(directory.file("data"), options);
  Source source;
  source.data = reinterpret_cast<const std::byte*>(payload.data());
  source.size = payload.size();
  job->add(envelope, std::move(source));
  job->finish();
  const std::vector<TimelineTrack> tracks = Timeline::stop();
  uint64_t written = 0;
  double write_seconds = 0;
  size_t syncs = 0;
  for (const TimelineTrack& track : tracks) {
    for (const TimelineSpan& span : track.spans) {
      if (span.name == std::string("write")) {
        written += span.bytes;
        write_seconds += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
      }
      syncs += span.name == std::string("sync");
    }
  }
  EXPECT_GE(written, payload.size());
  EXPECT_GE(write_seconds, job->statistics().write_seconds);  // the span is around the lap
  EXPECT_EQ(syncs, 1u);
}

}  // namespace
}  // namespace pyckpt
