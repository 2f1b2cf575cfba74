// Files written from devices and read into them: slots are not reused while a copy needs them.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "crc32.h"
#include "cuda_support.h"
#include "error.h"
#include "read_job.h"
#include "write_job.h"

namespace pyckpt {
namespace {

using namespace test;

class IoCudaTest : public CudaTest {
 protected:
  static WriteOptions unsynced() { return {Direct::kAuto, false, 0}; }

  static Source staged_source(const std::shared_ptr<Staged>& staged) {
    Source source;
    source.data = staged->data();
    source.size = staged->size();
    source.staged = staged;
    return source;
  }

  std::string make_file(size_t size) {
    const std::string bytes = random_bytes(random_, size);
    std::ofstream(path_, std::ios::binary) << bytes;
    return bytes;
  }

  // A read of the whole file into a device.
  std::shared_ptr<ReadJob> read(Engine* engine, const std::shared_ptr<Device>& device,
                                std::byte* to, size_t size) {
    const auto job = engine->make_read(Direct::kAuto, true);
    job->add_file(path_);
    Destination destination;
    destination.data = to;
    destination.device = device;
    job->add(0, 0, size, destination);
    return job;
  }

  // The engine's streams of its one device: to the host, and from it.
  cudaStream_t from_host() { return cuda_.engine_streams().at(1); }

  TempDirectory directory_;
  const std::string path_ = directory_.file("file");
};

TEST_F(IoCudaTest, WritesAllSizes) {
  Engine engine(small());
  const auto device = engine.cuda_device(1);
  const auto job = engine.start_write(path_, unsynced());
  std::vector<Sample> samples;
  for (const size_t size : {0, 1, 4095, 4096, 4097, 7919, 65535, 65536, 262145, (1 << 20) + 1}) {
    Sample sample;
    sample.payload = random_bytes(random_, size);
    sample.envelope = make_envelope(random_, 100, 50, size);
    sample.source = device_source(device, on_device(1, sample.payload), size);
    job->add(sample.envelope, sample.source);
    samples.push_back(std::move(sample));
  }
  job->finish();
  std::vector<Place> places;
  EXPECT_EQ(difference(read_file(path_), reference_file(samples, &places)), "");
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(job->items()[i].crc, places[i].crc);
}

// Slots go round only as copies into them are over.
TEST_F(IoCudaTest, AWriteWaitsForItsCopies) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  const std::string bytes = random_bytes(random_, 50 * 4096 + 1);
  cuda_.hold(copies);
  const auto job = engine.start_write(path_, unsynced());
  job->add(nullptr, device_source(device, on_device(0, bytes), bytes.size()));
  auto finish = beside([&] { job->finish(); });
  const bool blocked = cuda_.blocked(2);  // both threads, with both slots
  EXPECT_TRUE(blocked);
  EXPECT_EQ(cuda_.pending_copies(copies), 2u);
  EXPECT_EQ(job->consumed(), 0u);
  cuda_.release(copies);
  finish.get();
  EXPECT_EQ(difference(read_file(path_), bytes), "");
  EXPECT_EQ(job->items()[0].crc, crc32(0, bytes.data(), bytes.size()));
}

TEST_F(IoCudaTest, SmallItemsOfAWindowLeaveInOneLaunch) {
  Engine engine({65536, 2, 2, 0});
  const auto device = engine.cuda_device(0);
  const auto job = engine.start_write(path_, unsynced());
  std::string expected;
  for (int i = 0; i < 500; ++i) {
    const std::string bytes = random_bytes(random_, 100);
    job->add(nullptr, device_source(device, on_device(0, bytes), bytes.size()));
    expected += bytes;
  }
  job->finish();
  EXPECT_EQ(difference(read_file(path_), expected), "");
  EXPECT_EQ(cuda_.launches(), (std::vector<size_t>{500}));
}

// A window of two devices; and what was written before the call.
TEST_F(IoCudaTest, WritesFromSeveralDevices) {
  Engine engine({65536, 2, 2, 0});
  const auto job = engine.start_write(path_, unsynced());
  for (const int index : {0, 1}) {
    const auto device = engine.cuda_device(index);
    const cudaStream_t program = cuda_.make_stream(index);
    std::byte* const memory = on_device(index, "before");
    cuda_.hold(program);
    write_later(program, memory, "late " + std::to_string(index));
    device->follow(program);
    job->add(nullptr, device_source(device, memory, 6));
  }
  auto finish = beside([&] { job->finish(); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.release_all();
  finish.get();
  EXPECT_EQ(read_file(path_), "late 0late 1");
}

TEST_F(IoCudaTest, AFailedWriteLeavesNoFileAndAFitEngine) {
  for (const char* call : {"cudaMemcpyAsync", "cudaEventCreateWithFlags", "cudaEventRecord",
                           "cudaEventSynchronize", "cudaStreamCreateWithFlags", "cudaSetDevice",
                           "cudaDeviceGetAttribute", "cudaHostRegister", "cudaLaunchKernel"}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const std::string bytes = random_bytes(random_, 10000);
    std::byte* const memory = on_device(0, bytes);
    cuda_.fail(call, 1, cudaErrorMemoryAllocation);
    std::shared_ptr<WriteJob> job;
    const auto write = [&] {
      job = engine.start_write(path_, unsynced());
      for (const size_t at : {0, 1000, 2000}) {
        job->add(nullptr, device_source(device, memory + at, at == 2000 ? 8000 : 1000));
      }
      job->finish();
    };
    try {
      write();
      ADD_FAILURE() << call << " did not fail";
    } catch (const CudaError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("cudaErrorMemoryAllocation: out of memory"), std::string::npos) << text;
      const std::string name = std::string(call) == "cudaLaunchKernel" ? "the kernel" : call;
      EXPECT_EQ(text.find(name), 0u) << text;
    }
    EXPECT_TRUE(cuda_.heal());
    job->abandon();
    EXPECT_FALSE(exists(path_));
    write();
    EXPECT_EQ(difference(read_file(path_), bytes), "");
    std::remove(path_.c_str());
  }
}

TEST_F(IoCudaTest, ReadsAllSizes) {
  Engine engine(small());
  const auto device = engine.cuda_device(1);
  for (const size_t size : {1, 4095, 4096, 4097, 7919, 65536, (1 << 20) + 1}) {
    const std::string bytes = make_file(size);
    std::byte* const memory = cuda_.allocate(1, size);
    EXPECT_EQ(read(&engine, device, memory, size)->run()[0], crc32(0, bytes.data(), size));
    // Without asking any stream to wait: it is there.
    EXPECT_EQ(difference(bytes_at(memory, size), bytes), "");
  }
}

TEST_F(IoCudaTest, AReadWaitsForItsCopies) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  device->to_host();
  const std::string bytes = make_file(50 * 4096 + 1);
  std::byte* const memory = cuda_.allocate(0, bytes.size());
  cuda_.hold(from_host());
  const auto job = read(&engine, device, memory, bytes.size());
  auto run = beside([&] { job->run(); });
  EXPECT_TRUE(cuda_.queued(from_host(), 2));  // as many as there are slots
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(cuda_.pending_copies(from_host()), 2u);
  cuda_.release(from_host());
  run.get();
  EXPECT_EQ(difference(bytes_at(memory, bytes.size()), bytes), "");
}

// A thread that has read reads on while its copy is under way, as far as there are slots.
TEST_F(IoCudaTest, AThreadReadsOnWhileItsCopiesAreUnderWay) {
  Engine engine({4096, 4, 1, 0});
  const auto device = engine.cuda_device(0);
  device->to_host();
  const std::string bytes = make_file(50 * 4096 + 1);
  std::byte* const memory = cuda_.allocate(0, bytes.size());
  cuda_.hold(from_host());
  const auto job = read(&engine, device, memory, bytes.size());
  auto run = beside([&] { job->run(); });
  EXPECT_TRUE(cuda_.queued(from_host(), 4));
  // Whoever needs a slot waits for the device, and for nobody else.
  const std::string written = random_bytes(random_, 3 * 4096);
  const std::string path = directory_.file("other");
  const auto write = engine.start_write(path, unsynced());
  Source source;
  source.data = reinterpret_cast<const std::byte*>(written.data());
  source.size = written.size();
  write->add(nullptr, source);
  cuda_.release(from_host());
  write->finish();
  run.get();
  EXPECT_EQ(difference(bytes_at(memory, bytes.size()), bytes), "");
  EXPECT_EQ(difference(read_file(path), written), "");
}

// All that was queued is over when a read fails, also on devices beside the one that failed.
TEST_F(IoCudaTest, AFailedReadWaitsForItsCopies) {
  Engine engine({65536, 2, 1, 0});
  const std::shared_ptr<Device> devices[] = {engine.cuda_device(0), engine.cuda_device(1)};
  for (const auto& device : devices) device->to_host();
  make_file(200);
  const auto job = engine.make_read(Direct::kAuto, true);
  job->add_file(path_);
  for (const int index : {0, 1}) {
    Destination destination;
    destination.data = cuda_.allocate(index, 100);
    destination.device = devices[index];
    job->add(0, index == 0 ? 0 : 100, 100, destination);
  }
  cuda_.hold(from_host());
  cuda_.fail("cudaMemcpyAsync", 2);
  auto run = beside([&] { job->run(); });
  EXPECT_TRUE(cuda_.blocked(1));
  EXPECT_EQ(cuda_.pending_copies(from_host()), 1u);
  cuda_.release(from_host());
  EXPECT_THROW(run.get(), CudaError);
  EXPECT_TRUE(cuda_.heal());
}

// A slot whose copy is under way is not given to others, also where the wait for it failed.
TEST_F(IoCudaTest, AFailedWaitWaitsForTheCopies) {
  for (const char* call : {"cudaEventSynchronize", "cudaSetDevice"}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    device->to_host();
    const std::string bytes = make_file(100);
    std::byte* const memory = cuda_.allocate(0, bytes.size());
    cuda_.hold(from_host());
    const auto job = read(&engine, device, memory, bytes.size());
    // The first call of cudaSetDevice is that of queueing the copy.
    cuda_.fail(call, call == std::string("cudaSetDevice") ? 2 : 1);
    auto run = beside([&] { job->run(); });
    EXPECT_TRUE(cuda_.blocked(1)) << call;
    EXPECT_EQ(cuda_.pending_copies(from_host()), 1u);
    cuda_.release(from_host());
    EXPECT_THROW(run.get(), CudaError) << call;
    EXPECT_TRUE(cuda_.heal());
  }
}

TEST_F(IoCudaTest, TheEngineClosesWhileCopiesOfAReadAreUnderWay) {
  auto engine = std::make_unique<Engine>(small());
  const auto device = engine->cuda_device(0);
  device->to_host();
  const std::string bytes = make_file(50 * 4096 + 1);
  std::byte* const memory = cuda_.allocate(0, bytes.size());
  cuda_.hold(from_host());
  const auto job = read(engine.get(), device, memory, bytes.size());
  auto run = beside([&] { job->run(); });
  EXPECT_TRUE(cuda_.queued(from_host(), 2));
  engine->close();
  EXPECT_EQ(cuda_.pending_copies(from_host()), 2u);
  cuda_.release(from_host());
  EXPECT_THROW(run.get(), EngineClosed);
}

// What the program still writes to the memory comes before what is read.
TEST_F(IoCudaTest, AReadFollowsTheProgram) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const std::string bytes = make_file(100);
  std::byte* const memory = cuda_.allocate(0, bytes.size());
  cuda_.hold(program);
  write_later(program, memory, std::string(100, '?'));
  device->follow(program);
  const auto job = read(&engine, device, memory, bytes.size());
  auto run = beside([&] { job->run(); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.settle();
  cuda_.release(program);
  run.get();
  cuda_.settle();
  EXPECT_EQ(difference(bytes_at(memory, bytes.size()), bytes), "");
}

TEST_F(IoCudaTest, AFailedReadLeavesAFitEngine) {
  for (const char* call : {"cudaMemcpyAsync", "cudaEventCreateWithFlags", "cudaEventRecord",
                           "cudaEventSynchronize", "cudaStreamCreateWithFlags", "cudaSetDevice",
                           "cudaDeviceGetAttribute", "cudaHostRegister"}) {
    Engine engine(small());
    const auto device = engine.cuda_device(0);
    const std::string bytes = make_file(10000);
    std::byte* const memory = cuda_.allocate(0, bytes.size());
    cuda_.fail(call, 1);
    EXPECT_THROW(read(&engine, device, memory, bytes.size())->run(), CudaError) << call;
    EXPECT_TRUE(cuda_.heal());
    read(&engine, device, memory, bytes.size())->run();
    EXPECT_EQ(difference(bytes_at(memory, bytes.size()), bytes), "");
  }
}

// A file written from staged copies while they are still on their way.
TEST_F(IoCudaTest, WritesCopiesThatAreOnTheirWay) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  std::vector<Sample> samples;
  std::vector<StageSource> sources;
  // In slots, and in place.
  for (const size_t size : {0, 1, 4097, 70000, 1 << 20, (2 << 20) + 5}) {
    Sample sample;
    sample.payload = random_bytes(random_, size);
    sample.envelope = make_envelope(random_, 100, 50, size);
    sources.push_back(source(device, on_device(0, sample.payload), size, size % 2 == 0));
    samples.push_back(std::move(sample));
  }
  const auto staging = stage(&engine, sources, {{device, program}});
  const auto job = engine.start_write(path_, unsynced());
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].source = staged_source(staging->staged()[i]);
    job->add(samples[i].envelope, samples[i].source);
  }
  auto finish = beside([&] { job->finish(); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.release(copies);
  finish.get();
  std::vector<Place> places;
  EXPECT_EQ(difference(read_file(path_), reference_file(samples, &places)), "");
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(job->items()[i].crc, places[i].crc);
}

// With nothing else that a thread could wait for.
TEST_F(IoCudaTest, WritesInPlaceWhatIsOnItsWay) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  Sample sample;
  sample.payload = random_bytes(random_, 1 << 20);
  sample.envelope = make_envelope(random_, 100, 50, sample.payload.size());
  const auto staging =
      stage(&engine, {source(device, on_device(0, sample.payload), sample.payload.size(), true)},
            {{device, program}});
  const auto job = engine.start_write(path_, unsynced());
  sample.source = staged_source(staging->staged()[0]);
  job->add(sample.envelope, sample.source);
  auto finish = beside([&] { job->finish(); });
  EXPECT_TRUE(cuda_.blocked(1));
  cuda_.release(copies);
  finish.get();
  std::vector<Place> places;
  EXPECT_EQ(difference(read_file(path_), reference_file({sample}, &places)), "");
}

// While all threads wait for copies of one job, another one's host memory is copied nonetheless.
TEST_F(IoCudaTest, AllThreadsWaitForCopies) {
  Engine engine(small());
  const auto device = engine.cuda_device(0);
  const cudaStream_t program = cuda_.make_stream(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  const std::string bytes = random_bytes(random_, 20 * 4096);
  const auto staging = stage(&engine, {source(device, on_device(0, bytes), bytes.size(), true)},
                             {{device, program}});
  const auto job = engine.start_write(path_, unsynced());
  job->add(nullptr, staged_source(staging->staged()[0]));
  EXPECT_TRUE(cuda_.blocked(2));
  const std::string host = random_bytes(random_, 3 << 20);
  const auto* const data = reinterpret_cast<const std::byte*>(host.data());
  const auto next = stage(
      &engine,
      {source(nullptr, data, 100, false), source(nullptr, data + 4096, host.size() - 4096, true),
       source(device, on_device(0, "abc"), 3, false)},
      {{device, program}});
  next->wait_volatile();
  EXPECT_EQ(staged_bytes(*next, 0), host.substr(0, 100));
  next->wait_host();  // makes the guarded copies itself
  EXPECT_EQ(difference(staged_bytes(*next, 1), host.substr(4096)), "");
  cuda_.release(copies);
  next->wait();
  EXPECT_EQ(staged_bytes(*next, 2), "abc");
  job->finish();
  EXPECT_EQ(difference(read_file(path_), bytes), "");
}

TEST_F(IoCudaTest, TheEngineClosesWhileAWriteWaitsForCopies) {
  auto engine = std::make_unique<Engine>(small());
  const auto device = engine->cuda_device(0);
  const auto copies = static_cast<cudaStream_t>(device->to_host());
  cuda_.hold(copies);
  const std::string bytes(10 * 4096, 'x');
  auto job = engine->start_write(path_, unsynced());
  job->add(nullptr, device_source(device, on_device(0, bytes), bytes.size()));
  EXPECT_TRUE(cuda_.blocked(2));
  auto close = beside([&] { engine->close(); });
  EXPECT_THROW(for (;;) job->add(nullptr, Source()), EngineClosed);
  cuda_.release(copies);
  close.get();
  job.reset();
  EXPECT_FALSE(exists(path_));
}

}  // namespace
}  // namespace pyckpt
