// The async allocator over the emulated driver, as the shim uses it: through a Runtime of its own for each test.
#include "core/async.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "tests/harness/child.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;
using harness::kMillisecond;
using harness::SharedWord;
using namespace std::chrono_literals;

class AsyncTest : public harness::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    REQUIRE_CU(0, harness::LoadKernels());
    REQUIRE_CU(0, driver().DeviceGetDefaultMemPool(&pool, 0));
    SetThreshold(0);  // the pool is the device's, and other tests have used it
    CHECK_CU(0, driver().MemPoolTrimTo(pool, 0));
  }

  // A runtime whose device is reset in the middle of driver calls (Reset, from a function of the table), with the frees
  // that reach the driver counted.
  void StartWithResets() {
    resetting = &Start();
    reset_context = context();
    frees = 0;
    table().cuMemFreeAsync = [](CUdeviceptr, CUstream) {
      ++frees;
      return CUDA_SUCCESS;
    };
  }
  static void Reset() {
    CHECK_CU(0, driver().DevicePrimaryCtxReset(0));
    resetting->ended(reset_context);
  }
  static inline Runtime* resetting = nullptr;
  static inline CUcontext reset_context = nullptr;
  static inline int frees = 0;

  // Counts the streams that the allocator makes.
  void CountStreams() {
    make_stream = table().cuStreamCreate;
    streams_made = 0;
    table().cuStreamCreate = [](CUstream* stream, unsigned flags) {
      ++streams_made;
      return make_stream(stream, flags);
    };
  }
  static inline decltype(Driver::cuStreamCreate) make_stream = nullptr;
  static inline int streams_made = 0;

  // The runtime under test, with these options besides ALLOCATOR=async.
  Runtime& Start(std::vector<const char*> environment = {}) {
    // Threads remember handles by the epoch: no two runtimes of this process may have the same.
    static std::uint64_t epochs = 0;
    runtime_ = &eternal<Runtime>();
    shared().handle_epoch = epochs += 1'000'000;
    EXPECT_TRUE(shared().driver.bind([](const char* name) { return dlsym(driver().library, name); }));
    environment.insert(environment.end(), {"CUSHION_ALLOCATOR=async", "CUSHION_OOM_WAIT=50ms", nullptr});
    LoadTime loaded;
    loaded.clock = ClockPair::now();
    while (monotonic_ns() < loaded.clock.ns + kMillisecond) {
    }
    EXPECT_TRUE(runtime_->start(environment.data(), "async_test", loaded));
    return *runtime_;
  }
  Runtime& runtime() { return *runtime_; }
  Shared& shared() { return runtime_->shared(); }
  Driver& table() { return shared().driver; }

  // 0 where the allocation is the driver's.
  CUdeviceptr Malloc(std::size_t bytes) {
    CUdeviceptr p = 0;
    return runtime_->malloc(&p, bytes, Api::malloc) ? p : 0;
  }
  // As the hook does where core leaves it to the driver.
  CUdeviceptr MallocAsync(std::size_t bytes, CUstream stream) {
    CUdeviceptr p = 0;
    EXPECT_FALSE(runtime_->malloc_async(&p, bytes, stream));
    CHECK_CU(0, driver().MemAllocAsync(&p, bytes, stream));
    runtime_->forwarded_block(Api::malloc_async, p, bytes, stream, true);
    return p;
  }
  // What the hook answers: the runtime, else the driver.
  CUresult Free(CUdeviceptr p) {
    const auto answer = runtime_->free(p);
    return answer ? *answer : driver().MemFree(p);
  }
  CUresult FreeAsync(CUdeviceptr p, CUstream stream) {
    const auto answer = runtime_->free_async(p, stream);
    return answer ? *answer : driver().MemFreeAsync(p, stream);
  }
  std::uint64_t live() {
    std::uint64_t blocks = 0;
    runtime_->for_each_foreign(Patience::some, [&](CUdeviceptr, const ForeignBlock&) { ++blocks; });
    return blocks;
  }

  cuuint64_t Figure(CUmemPool_attribute attribute) {
    cuuint64_t value = 0;
    CHECK_CU(0, driver().MemPoolGetAttribute(pool, attribute, &value));
    return value;
  }
  cuuint64_t used() {
    runtime_->unused_in_current();  // the pool knows what is free once the allocator has told it
    return Figure(CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
  }
  cuuint64_t reserved() { return Figure(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); }
  cuuint64_t threshold() { return Figure(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD); }
  void SetThreshold(cuuint64_t bytes) {
    CHECK_CU(0, driver().MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
  }
  const Counters& counters() { return shared().counters; }

  CUmemoryPool pool = nullptr;  // the default one

 private:
  Runtime* runtime_ = nullptr;
};

// Room for the alignment of a request above 1 MiB.
constexpr std::uint64_t kRoom = kBigAlignment - kUnit;

// ---- which bytes -------------------------------------------------------------------------------------------------

TEST_F(AsyncTest, ABlockIsEveryStreams) {
  Start();
  TestStream s;
  const SharedWord bad;
  for (const std::size_t bytes : {std::size_t{1'000}, 3 * kMiB}) {
    const CUdeviceptr p = Malloc(bytes);
    ASSERT_NE(p, 0u);
    CHECK_CU(0, harness::LaunchFill(s, p, bytes, 5));
    CHECK_CU(0, harness::LaunchCheck(s, p, bytes, 5, bad.on_device()));
    s.Finish();
    EXPECT_EQ(bad.Get(), 0u);
    CHECK_CU(0, Free(p));
    EXPECT_EQ(used(), 0u);
    EXPECT_EQ(Malloc(bytes), p) << "a block whose free waited is the next one";
    CHECK_CU(0, Free(p));
  }
}

TEST_F(AsyncTest, BlocksAreTheDefaultPools) {
  Runtime& runtime = Start();
  for (const std::size_t bytes : {std::size_t{1}, kMiB, kMiB + 1, 3 * kMiB}) {
    const CUdeviceptr p = Malloc(bytes);
    CUmemoryPool from = nullptr;
    CHECK_CU(0, driver().PointerGetAttribute(&from, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p));
    EXPECT_EQ(from, pool) << bytes;
    EXPECT_TRUE(runtime.owns(p)) << bytes;
    CHECK_CU(0, Free(p));
    EXPECT_FALSE(runtime.owns(p)) << bytes;
  }
}

// The program may forbid the pool what it does by itself; memory must not pile up for that.
TEST_F(AsyncTest, WhatASyncFreeGaveBackIsTheNextBlockWithoutOpportunisticReuse) {
  Start();
  int allowed = 0;
  CHECK_CU(0, driver().MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &allowed));
  const CUdeviceptr p = Malloc(3 * kMiB);
  CHECK_CU(0, Free(p));
  EXPECT_EQ(Malloc(3 * kMiB), p);
  allowed = 1;
  CHECK_CU(0, driver().MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &allowed));
}

// The driver aligns blocks of a pool to 512 bytes, big ones too.
TEST_F(AsyncTest, BlocksAreAligned) {
  Start();
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{513}, kMiB + 1, 2 * kMiB, 3 * kMiB + 7}) {
      const CUdeviceptr p = Malloc(bytes);
      EXPECT_NE(p, 0u) << bytes;
      EXPECT_EQ(p % (bytes > kMiB ? 64 << 10 : 512), 0u) << bytes;
    }
  }
}

TEST_F(AsyncTest, ABlockTheDriverAlignsTooLittleGoesBack) {
  Start();
  static decltype(Driver::cuMemAllocFromPoolAsync) real_allocate;
  static decltype(Driver::cuMemFreeAsync) real_free;
  real_allocate = table().cuMemAllocFromPoolAsync;
  real_free = table().cuMemFreeAsync;
  table().cuMemAllocFromPoolAsync = [](CUdeviceptr* out, std::size_t bytes, CUmemoryPool from, CUstream stream) {
    const CUresult result = real_allocate(out, bytes, from, stream);
    *out += kUnit / 2;
    return result;
  };
  table().cuMemFreeAsync = [](CUdeviceptr p, CUstream stream) { return real_free(p - kUnit / 2, stream); };
  EXPECT_EQ(Malloc(1'000), 0u);
  EXPECT_EQ(Malloc(kMiB + 1), 0u);
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(live(), 0u);
}

TEST_F(AsyncTest, NewMemoryHoldsWhatInitSays) {
  Start({"CUSHION_INIT=junk"});
  const CUdeviceptr p = Malloc(1'000);
  ASSERT_NE(p, 0u);
  EXPECT_EQ(harness::Bytes(p, 1'000), std::vector<std::uint8_t>(1'000, 0xFF));
}

TEST_F(AsyncTest, ServedBlocksAreCountedAndRemembered) {
  Runtime& runtime = Start({"CUSHION_TRACK=on"});
  const CUdeviceptr a = Malloc(1'000);
  const CUdeviceptr b = Malloc(2'000);
  CHECK_CU(0, Free(b));
  EXPECT_EQ(counters().served[static_cast<int>(Api::malloc)], 2u);
  EXPECT_EQ(counters().frees_served, 1u);
  EXPECT_EQ(counters().frees_forwarded, 0u);
  EXPECT_EQ(shared().from_driver_pool(0).current(), 1'000u);
  EXPECT_EQ(shared().from_driver_pool(0).peak(), 3'000u);
  EXPECT_EQ(shared().forwarded(0).peak(), 0u);
  EXPECT_EQ(live(), 1u);
  runtime.for_each_foreign(Patience::some, [&](CUdeviceptr address, const ForeignBlock& block) {
    EXPECT_EQ(address, a);
    EXPECT_EQ(block.size, 1'000u);
    EXPECT_NE(block.note.time, 0u);
    EXPECT_NE(block.server, nullptr);
  });
}

// ---- the release threshold ---------------------------------------------------------------------------------------

TEST_F(AsyncTest, TheThresholdIsRaisedFromItsDefaultAndMemoryStays) {
  Start();
  EXPECT_EQ(threshold(), 0u) << "nothing is touched before the first allocation";
  CHECK_CU(0, Free(Malloc(kMiB)));
  EXPECT_EQ(threshold(), UINT64_MAX);
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_GE(reserved(), kMiB);
}

TEST_F(AsyncTest, AnAsyncAllocationRaisesItTooAndIsTheDrivers) {
  Runtime& runtime = Start();
  const TestStream s;
  CUdeviceptr p = 0;
  EXPECT_FALSE(runtime.malloc_async(&p, kMiB, s));
  EXPECT_EQ(p, 0u);
  EXPECT_EQ(threshold(), UINT64_MAX);
}

TEST_F(AsyncTest, TheThresholdIsTheOptions) {
  Start({"CUSHION_RELEASE_THRESHOLD=8MiB"});
  ASSERT_NE(Malloc(kMiB), 0u);
  EXPECT_EQ(threshold(), 8 * kMiB);
}

TEST_F(AsyncTest, TheProgramsOwnThresholdStays) {
  Start();
  SetThreshold(12'345);
  ASSERT_NE(Malloc(kMiB), 0u);
  EXPECT_EQ(threshold(), 12'345u);
}

// ---- what waits for what -----------------------------------------------------------------------------------------

TEST_F(AsyncTest, MallocWaitsForNobody) {
  Start({"CUSHION_FREE=deferred"});
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(3 * kMiB);
  gate.Hold(s);
  CHECK_CU(0, Free(p));  // waits on a stream of its own
  const CUdeviceptr q = Malloc(3 * kMiB);
  EXPECT_NE(q, 0u);
  EXPECT_NE(q, p) << "what may be in use is not handed out";
  EXPECT_TRUE(s.Busy());
  gate.Open();
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(Malloc(3 * kMiB), p);
}

TEST_F(AsyncTest, ASyncFreeWaitsForItsContext) {
  Start();
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(1'000);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return Free(p); });
  EXPECT_EQ(freed.wait_for(20ms), std::future_status::timeout);
  EXPECT_EQ(used(), 1'000u);
  gate.Open();
  CHECK_CU(0, freed.get());
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(counters().free_waits, 1u);
}

TEST_F(AsyncTest, ADeferredFreeWaitsForWhatCameBeforeItOnly) {
  Start({"CUSHION_FREE=deferred"});
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(3 * kMiB);
  CHECK_CU(0, Free(p));
  gate.Hold(s);
  EXPECT_EQ(Malloc(3 * kMiB), p) << "the fence is of the moment of the free";
  EXPECT_TRUE(s.Busy());
}

class AsyncWithoutFence : public AsyncTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Free, AsyncWithoutFence, testing::Bool(),
                         [](const auto& deferred) { return deferred.param ? "deferred" : "sync"; });

TEST_P(AsyncWithoutFence, AFreeWaitsOnAnOldDriver) {
  Start({GetParam() ? "CUSHION_FREE=deferred" : "CUSHION_FREE=sync"});
  table().cuCtxRecordEvent = nullptr;
  TestStream s;
  const CUdeviceptr p = Malloc(1'000);
  ASSERT_NE(p, 0u);
  CHECK_CU(0, harness::LaunchHold(s, 20 * kMillisecond));
  CHECK_CU(0, Free(p));
  EXPECT_FALSE(s.Busy());
  EXPECT_EQ(used(), 0u);
}

TEST_P(AsyncWithoutFence, BesideACaptureAFreeWaitsAndNothingIsServed) {
  Start({GetParam() ? "CUSHION_FREE=deferred" : "CUSHION_FREE=sync"});
  const TestStream c;
  TestStream s;
  const CUdeviceptr p = Malloc(1'000);
  ASSERT_NE(p, 0u);
  shared().gate.begin();
  const CUresult begun = driver().StreamBeginCapture(c, CU_STREAM_CAPTURE_MODE_GLOBAL);
  shared().gate.begun(c, context(), 0, begun == CUDA_SUCCESS);
  REQUIRE_CU(0, begun);
  EXPECT_EQ(Malloc(1'000), 0u);
  CHECK_CU(1, FreeAsync(p, c)) << "memory from outside cannot be freed in a graph";
  CHECK_CU(0, harness::LaunchHold(s, 20 * kMillisecond));
  CHECK_CU(0, Free(p));
  CUgraph graph = nullptr;
  CHECK_CU(0, driver().StreamEndCapture(c, &graph));
  driver().GraphDestroy(graph);
  shared().gate.refresh(table(), 0);
  EXPECT_FALSE(s.Busy());
  EXPECT_NE(Malloc(1'000), 0u);
}

// A full device: the driver makes the allocation wait for another stream's free, which waits for the host.
class AsyncOnAFullDevice : public AsyncTest, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Init, AsyncOnAFullDevice, testing::Values("none", "junk"),
                         [](const auto& init) { return std::string(init.param); });

TEST_P(AsyncOnAFullDevice, WhereTheDriverWaitsForAnotherStreamTheHostDoesNotForLong) {
  const std::string init = std::string("CUSHION_INIT=") + GetParam();
  Start({init.c_str()});
  // Filling takes the emulated device long; here it is what waits before it that counts.
  table().cuMemsetD8Async = [](CUdeviceptr, unsigned char, std::size_t, CUstream) { return CUDA_SUCCESS; };
  TestStream s;
  ASSERT_NE(Malloc(1), 0u);  // its own streams are there
  const CUdeviceptr p = Malloc(64 * kMiB);
  const Hog hog(40 * kMiB);
  Gate gate;
  gate.Hold(s);
  CHECK_CU(0, FreeAsync(p, s));
  EXPECT_EQ(Malloc(64 * kMiB), 0u);
  EXPECT_NE(Malloc(2 * kMiB), 0u) << "the stream that waits is not used any more";
  EXPECT_TRUE(s.Busy());
  gate.Open();
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(used(), 2 * kMiB + kRoom + 1) << "what came too late went back";
}

// A stream that waited is used again once it is idle: there are never more than have waited at the same time, and one.
TEST_F(AsyncTest, StreamsThatWaitedAreUsedAgain) {
  Start();
  CountStreams();
  table().cuMemsetD8Async = [](CUdeviceptr, unsigned char, std::size_t, CUstream) { return CUDA_SUCCESS; };
  TestStream s;
  ASSERT_NE(Malloc(1), 0u);
  const Hog hog(70 * kMiB);
  for (int round = 0; round < 4; ++round) {
    const CUdeviceptr p = Malloc(60 * kMiB);
    ASSERT_NE(p, 0u);
    Gate gate;
    gate.Hold(s);
    CHECK_CU(0, FreeAsync(p, s));
    EXPECT_EQ(Malloc(60 * kMiB), 0u);
    const CUdeviceptr q = Malloc(2 * kMiB);
    EXPECT_NE(q, 0u);
    gate.Open();
    CHECK_CU(0, driver().CtxSynchronize());
    CHECK_CU(0, Free(q));
  }
  EXPECT_EQ(streams_made, 3) << "one to free on, and two to allocate on";
}

// While queries fail nothing is served, and nothing piles up.
TEST_F(AsyncTest, AnErrorInsteadOfAnAnswerLosesNoStreamAndNoMemory) {
  Start();
  CountStreams();
  ASSERT_NE(Malloc(1), 0u);
  const auto ask = table().cuStreamQuery;
  static decltype(Driver::cuMemFreeAsync) real_free;
  static bool refuses;
  real_free = table().cuMemFreeAsync;
  refuses = true;
  table().cuStreamQuery = [](CUstream) { return CUDA_ERROR_UNKNOWN; };
  table().cuMemFreeAsync = [](CUdeviceptr p, CUstream stream) {
    return refuses ? CUDA_ERROR_UNKNOWN : real_free(p, stream);
  };
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Malloc(kMiB), 0u);
  EXPECT_EQ(streams_made, 2);
  table().cuStreamQuery = ask;
  EXPECT_EQ(used(), 1 + 5 * kMiB) << "the driver would not have them back";
  refuses = false;
  runtime().relieve(0);
  EXPECT_EQ(used(), 1u);
}

// ---- frees -------------------------------------------------------------------------------------------------------

TEST_F(AsyncTest, FreeAsyncIsTheDriversInItsOrder) {
  Start();
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(3 * kMiB);
  gate.Hold(s);
  CHECK_CU(0, FreeAsync(p, s));
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(counters().frees_served, 1u);
  const CUdeviceptr q = Malloc(3 * kMiB);
  EXPECT_NE(q, p);
  EXPECT_NE(q, 0u);
  EXPECT_TRUE(s.Busy());
}

// A small block first: the big one's base then lies off the boundary that is handed out.
TEST_F(AsyncTest, ABigBlockIsFreedWhole) {
  Start();
  TestStream s;
  ASSERT_NE(Malloc(1), 0u);
  const cuuint64_t before = used();
  const CUdeviceptr p = Malloc(3 * kMiB);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  CHECK_CU(0, driver().MemGetAddressRange(&base, &size, p));
  EXPECT_NE(base, p);
  EXPECT_LE(p + 3 * kMiB, base + size);
  EXPECT_EQ(used(), before + 3 * kMiB + kRoom);
  const auto real_free = table().cuMemFreeAsync;
  table().cuMemFreeAsync = [](CUdeviceptr, CUstream) { return CUDA_ERROR_UNKNOWN; };
  CHECK_CU(999, Free(p));
  CHECK_CU(999, FreeAsync(p, s));
  table().cuMemFreeAsync = real_free;
  CHECK_CU(0, Free(p));
  EXPECT_EQ(used(), before);
  EXPECT_EQ(Malloc(3 * kMiB), p);
  CHECK_CU(0, FreeAsync(p, s));
  s.Finish();
  EXPECT_EQ(used(), before);
  EXPECT_EQ(live(), 1u);
}

// The driver's own cuMemFree of such memory would leave it counted as used.
TEST_F(AsyncTest, AFreeOfAsyncMemoryWaitsForNobodyAndIsKnown) {
  Runtime& runtime = Start();
  TestStream s, t;
  Gate gate;
  const CUdeviceptr p = MallocAsync(8 * kMiB, s);
  gate.Hold(s);
  CHECK_CU(0, Free(p));
  EXPECT_TRUE(s.Busy());
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(counters().frees_forwarded, 1u);
  EXPECT_EQ(shared().forwarded(0).current(), 0u);
  EXPECT_EQ(used(), 8 * kMiB) << "it may be in use";
  EXPECT_NE(MallocAsync(8 * kMiB, t), p);
  CHECK_CU(1, Free(p));
  gate.Open();
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(used(), 8 * kMiB) << "the second block";
  EXPECT_EQ(runtime.unused_in_current(), reserved() - 8 * kMiB);
}

TEST_F(AsyncTest, AFreeOfAsyncMemoryThatFailsLeavesItLive) {
  Start();
  const TestStream s;
  const CUdeviceptr p = MallocAsync(kMiB, s);
  const auto real_free = table().cuMemFreeAsync;
  table().cuMemFreeAsync = [](CUdeviceptr, CUstream) { return CUDA_ERROR_UNKNOWN; };
  CHECK_CU(999, Free(p));
  table().cuMemFreeAsync = real_free;
  EXPECT_EQ(live(), 1u);
  CHECK_CU(0, Free(p));
  EXPECT_EQ(live(), 0u);
}

// Where it could not be ordered without a wait, or the program manages the device's pools, the free is the driver's.
TEST_F(AsyncTest, AFreeOfAsyncMemoryIsTheDriversWithoutAFence) {
  Runtime& runtime = Start();
  const TestStream s;
  const CUdeviceptr p = MallocAsync(kMiB, s);
  const auto real_record = table().cuCtxRecordEvent;
  table().cuCtxRecordEvent = nullptr;
  EXPECT_FALSE(runtime.free(p).has_value());
  table().cuCtxRecordEvent = real_record;
  shared().gate.begin();
  EXPECT_FALSE(runtime.free(p).has_value());
  shared().gate.begun(nullptr, nullptr, 0, false);
  runtime.pool_changed(0);
  EXPECT_FALSE(runtime.free(p).has_value());
  EXPECT_EQ(live(), 1u);
  CHECK_CU(0, driver().MemFree(p));
}

TEST_F(AsyncTest, WrongPointersAreInvalid) {
  Start();
  const TestStream s;
  const CUdeviceptr p = Malloc(3 * kMiB);
  CHECK_CU(1, Free(p + 512));
  CHECK_CU(1, FreeAsync(p + 512, s));
  CHECK_CU(0, Free(p));
  CHECK_CU(1, Free(p));
  CHECK_CU(1, FreeAsync(p, s));
  const CUdeviceptr q = Malloc(3 * kMiB);
  CHECK_CU(0, FreeAsync(q, s));
  CHECK_CU(1, FreeAsync(q, s));
  CHECK_CU(1, Free(q));
  EXPECT_EQ(counters().frees_served, 2u);
}

TEST_F(AsyncTest, OfTwoFreesAtOnceOneWins) {
  Runtime& runtime = Start();
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(1'000);
  gate.Hold(s);
  std::future<CUresult> first = std::async(std::launch::async, [&] { return Free(p); });
  for (bool under_way = false; !under_way;) {
    runtime.for_each_foreign(Patience::some, [&](CUdeviceptr, const ForeignBlock& b) { under_way |= b.freeing; });
  }
  CHECK_CU(1, Free(p));
  CHECK_CU(1, FreeAsync(p, s));
  gate.Open();
  CHECK_CU(0, first.get());
  EXPECT_EQ(used(), 0u);
}

TEST_F(AsyncTest, AFreeThatFailsLeavesTheBlockLive) {
  Start();
  const TestStream s;
  const CUdeviceptr p = Malloc(1'000);
  const auto real_wait = table().cuEventSynchronize;
  table().cuEventSynchronize = [](CUevent) { return CUDA_ERROR_UNKNOWN; };
  CHECK_CU(999, Free(p));
  table().cuEventSynchronize = real_wait;
  const auto real_free = table().cuMemFreeAsync;
  table().cuMemFreeAsync = [](CUdeviceptr, CUstream) { return CUDA_ERROR_UNKNOWN; };
  CHECK_CU(999, Free(p));
  CHECK_CU(999, FreeAsync(p, s));
  table().cuMemFreeAsync = real_free;
  EXPECT_EQ(live(), 1u);
  EXPECT_EQ(shared().from_driver_pool(0).current(), 1'000u);
  CHECK_CU(0, Free(p));
  EXPECT_EQ(live(), 0u);
}

TEST_F(AsyncTest, AfterAStickyErrorNothingIsServed) {
  Start();
  const CUdeviceptr p = Malloc(1'000);
  const auto real = table().cuEventSynchronize;
  table().cuEventSynchronize = [](CUevent) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  CHECK_CU(700, Free(p));
  table().cuEventSynchronize = real;
  EXPECT_EQ(Malloc(1'000), 0u);
  CHECK_CU(700, Free(p));
}

// ---- whose call it is --------------------------------------------------------------------------------------------

TEST_F(AsyncTest, ADeviceWithoutPoolsIsNotServed) {
  Start();
  table().cuDeviceGetDefaultMemPool = nullptr;  // a driver before 11.2
  EXPECT_EQ(Malloc(1'000), 0u);
}

TEST_F(AsyncTest, ADeviceWhosePoolsTheProgramManagesIsNotServed) {
  Runtime& runtime = Start();
  const CUdeviceptr p = Malloc(1'000);
  runtime.pool_changed(0);
  EXPECT_EQ(Malloc(1'000), 0u);
  CHECK_CU(0, Free(p));
}

// Destroying a context that the program made would not give the memory back: it is the device's.
TEST_F(AsyncTest, OnlyThePrimaryContextIsServed) {
  Runtime& runtime = Start();
  CHECK_CU(0, Free(Malloc(64 * kMiB)));
  const std::uint64_t unused = runtime.unused_in_current();
  EXPECT_GE(unused, 64 * kMiB);
  CUcontext mine = nullptr;
  REQUIRE_CU(0, driver().CtxCreate(&mine, 0, 0));
  runtime.context_created(mine);
  EXPECT_EQ(Malloc(1'000), 0u);
  EXPECT_EQ(Malloc(3 * kMiB), 0u);
  EXPECT_NE(runtime.find_context(mine), nullptr) << "the program's own context is known";
  EXPECT_EQ(runtime.unused_in_current(), unused) << "free memory is the device's";
  CHECK_CU(0, driver().CtxDestroy(mine));
  runtime.ended(mine);
  CHECK_CU(0, driver().CtxSetCurrent(context()));
  EXPECT_NE(Malloc(1'000), 0u);
}

TEST_F(AsyncTest, AContextThatEndsIsNotServed) {
  Runtime& runtime = Start();
  ASSERT_NE(Malloc(1'000), 0u);
  Context* mine = runtime.find_context(context());
  mine->closing(true);
  EXPECT_EQ(Malloc(1'000), 0u);
  mine->closing(false);
  EXPECT_NE(Malloc(1'000), 0u);
}

// Natively a peer reaches cudaMalloc's memory once access is enabled, and a pool's never by that.
TEST_F(AsyncTest, PeersReachWhatWasServedBefore) {
  const auto program = [&] {
    Runtime& runtime = Start();
    const CUdeviceptr small = Malloc(1'000);
    const CUdeviceptr p = Malloc(3 * kMiB);
    const harness::Gpu other(1);
    CHECK_CU(0, harness::LoadKernels());
    CHECK_CU(0, driver().CtxEnablePeerAccess(context(), 0));
    runtime.peer_enabled(context(), true);
    const harness::Stream stream;
    for (const CUdeviceptr reached : {small, p}) CHECK_CU(0, harness::LaunchFill(stream, reached, 1'000, 7));
    CHECK_CU(0, stream.Synchronize());
    CHECK_CU(0, driver().CtxSetCurrent(context()));
    EXPECT_EQ(Malloc(1'000), 0u) << "the driver's own memory is in reach";
    // A free waits for its own context on the host, and for the peer's before the memory is used again.
    CHECK_CU(0, harness::LaunchHold(stream, 50 * kMillisecond));
    CHECK_CU(0, Free(p));
    CHECK_CU(CUDA_ERROR_NOT_READY, driver().StreamQuery(stream));
    const TestStream s;
    CUdeviceptr q = 0;
    CHECK_CU(0, driver().MemAllocAsync(&q, 3 * kMiB, s));
    EXPECT_NE(q, p);
    CHECK_CU(0, stream.Synchronize());
    return HasFailure() ? 1 : 0;
  };
  const harness::ChildResult child = harness::RunChild("two devices", program, {{"EMU_DEVICES", "2"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

// ---- contexts that end -------------------------------------------------------------------------------------------

TEST_F(AsyncTest, AResetTakesBlocksAndStreamsAlong) {
  Runtime& runtime = Start();
  const CUdeviceptr p = Malloc(1'000);
  const CUdeviceptr big = Malloc(3 * kMiB);
  REQUIRE_CU(0, driver().DevicePrimaryCtxReset(0));
  runtime.ended(context());
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(shared().from_driver_pool(0).current(), 0u);
  EXPECT_EQ(counters().reset_blocks, 2u);
  EXPECT_EQ(counters().reset_bytes, 1'000 + 3 * kMiB);
  CHECK_CU(1, Free(p));
  CHECK_CU(1, Free(big));

  CUcontext again = nullptr;
  SetThreshold(0);
  REQUIRE_CU(0, driver().DevicePrimaryCtxRetain(&again, 0));
  EXPECT_EQ(reserved(), 0u) << "it was the pool's that a reset empties";
  for (const std::size_t bytes : {std::size_t{1'000}, 3 * kMiB}) {
    const CUdeviceptr q = Malloc(bytes);
    EXPECT_NE(q, 0u);
    CHECK_CU(0, Free(q));
  }
  EXPECT_EQ(threshold(), UINT64_MAX);
  driver().DevicePrimaryCtxRelease(0);
}

TEST_F(AsyncTest, AResetDuringAnAllocationLeavesNothingBehind) {
  static PFN_cuMemAllocFromPoolAsync_v11020 real;
  static int calls;
  StartWithResets();
  calls = 0;
  real = table().cuMemAllocFromPoolAsync;
  table().cuMemAllocFromPoolAsync = [](CUdeviceptr* out, std::size_t bytes, CUmemoryPool from, CUstream stream) {
    const CUresult result = real(out, bytes, from, stream);
    Reset();
    return result;
  };
  table().cuStreamQuery = [](CUstream) {
    ++calls;
    return CUDA_SUCCESS;
  };
  EXPECT_EQ(Malloc(1'000), 0u);
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(calls, 0) << "the stream is gone";
  EXPECT_EQ(frees, 0) << "the address may be another's by now";
}

TEST_F(AsyncTest, AResetDuringTheWaitOfAnAllocationLeavesNothingBehind) {
  static CUresult answer;
  StartWithResets();
  table().cuStreamQuery = [](CUstream) {
    Reset();
    return answer;
  };
  for (const CUresult result : {CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE}) {
    answer = result;
    EXPECT_EQ(Malloc(1'000), 0u);
    EXPECT_EQ(live(), 0u);
    EXPECT_EQ(frees, 0);
    CUcontext again = nullptr;
    REQUIRE_CU(0, driver().DevicePrimaryCtxRetain(&again, 0));
    driver().DevicePrimaryCtxRelease(0);
  }
}

TEST_F(AsyncTest, AResetDuringAFreeFreesNothing) {
  StartWithResets();
  const CUdeviceptr p = Malloc(1'000);
  table().cuEventSynchronize = [](CUevent) {
    Reset();
    return CUDA_SUCCESS;
  };
  CHECK_CU(0, Free(p));
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(frees, 0);
}

// ---- memory for others -------------------------------------------------------------------------------------------

TEST_F(AsyncTest, WhatThePoolDoesNotUseIsFreeMemoryAndGoesBack) {
  Runtime& runtime = Start();
  const CUdeviceptr kept = Malloc(4 * kMiB - kRoom);  // with room for the alignment, whole chunks of the pool
  CHECK_CU(0, Free(Malloc(64 * kMiB)));
  EXPECT_EQ(runtime.unused_in_current(), reserved() - used());
  EXPECT_GE(runtime.unused_in_current(), 64 * kMiB);
  EXPECT_TRUE(runtime.relieve(0));
  EXPECT_EQ(reserved(), used());
  EXPECT_EQ(runtime.unused_in_current(), 0u);
  EXPECT_FALSE(runtime.relieve(0));
  CHECK_CU(0, Free(kept));
}

TEST_F(AsyncTest, ReadingHowMuchIsFreeWaitsForNobody) {
  Runtime& runtime = Start({"CUSHION_FREE=deferred"});
  TestStream s;
  Gate gate;
  const CUdeviceptr p = Malloc(64 * kMiB);
  gate.Hold(s);
  CHECK_CU(0, Free(p));
  const std::uint64_t before = runtime.unused_in_current();
  EXPECT_LT(before, 64 * kMiB) << "it may be in use";
  EXPECT_TRUE(s.Busy());
  gate.Open();
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(runtime.unused_in_current(), before + 64 * kMiB + kRoom);
}

TEST_F(AsyncTest, ReliefWaitsForWhatIsStillInUseWithinBounds) {
  Runtime& runtime = Start({"CUSHION_FREE=deferred"});
  TestStream s;
  {
    Gate gate;
    const CUdeviceptr p = Malloc(64 * kMiB);
    gate.Hold(s);
    CHECK_CU(0, Free(p));
    EXPECT_FALSE(runtime.relieve(0)) << "50 ms were not enough";
    EXPECT_TRUE(s.Busy());
  }
  CHECK_CU(0, driver().CtxSynchronize());
  const CUdeviceptr q = Malloc(64 * kMiB);
  CHECK_CU(0, Free(Malloc(32 * kMiB)));
  CHECK_CU(0, harness::LaunchHold(s, 5 * kMillisecond));
  CHECK_CU(0, Free(q));
  EXPECT_TRUE(runtime.relieve(0)) << "for all of it, though a part goes back at once";
  EXPECT_EQ(reserved(), used());
}

TEST_F(AsyncTest, ThreadsKeepTheirBytesWhileFiguresAreReadAndPoolsTrimmed) {
  Runtime& runtime = Start({"CUSHION_FREE=deferred"});
  constexpr int kThreads = 3, kRounds = 60;
  const SharedWord bad;
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      CHECK_CU(0, driver().CtxSetCurrent(context()));
      const harness::Stream stream;
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t bytes = round % 2 == 0 ? 4'096 : 2 * kMiB;
        const auto byte = static_cast<std::uint8_t>(t * kRounds + round);
        CUdeviceptr p = 0;
        ASSERT_TRUE(runtime.malloc(&p, bytes, Api::malloc));
        CHECK_CU(0, harness::LaunchFill(stream, p, 4'096, byte));
        CHECK_CU(0, harness::LaunchCheck(stream, p, 4'096, byte, bad.on_device()));
        CHECK_CU(0, Free(p));
      }
      CHECK_CU(0, stream.Synchronize());
      --running;
    });
  }
  while (running != 0) {
    runtime.unused_in_current();
    runtime.relieve(0);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad.Get(), 0u);
  EXPECT_EQ(live(), 0u);
}

TEST_F(AsyncTest, BesideACaptureNothingGoesBack) {
  Runtime& runtime = Start();
  CHECK_CU(0, Free(Malloc(64 * kMiB)));
  shared().gate.begin();  // some thread is about to begin one
  EXPECT_FALSE(runtime.relieve(0));
  EXPECT_EQ(runtime.unused_in_current(), 0u) << "nor is a pool asked";
  shared().gate.begun(nullptr, nullptr, 0, false);
  EXPECT_TRUE(runtime.relieve(0));
}

// ---- every driver call may fail ----------------------------------------------------------------------------------

struct AsyncFault {
  const char* function;
  int call;  // fails this one and no other
  const char* free;

  std::string Plan(char separator) const { return std::string(function) + separator + std::to_string(call); }
};

void PrintTo(const AsyncFault& fault, std::ostream* out) { *out << fault.Plan(':') << " " << fault.free; }

// The first calls of every function that the allocator calls, after those that the fixture makes itself.
std::vector<AsyncFault> AsyncFaults() {
  struct Calls {
    const char* function;
    int before;
  };
  std::vector<AsyncFault> faults;
  for (const auto& [function, before] :
       {Calls{"cuDeviceGetDefaultMemPool", 1}, Calls{"cuMemPoolGetAttribute", 0}, Calls{"cuMemPoolSetAttribute", 1},
        Calls{"cuStreamSynchronize", 0}, Calls{"cuStreamCreate", 0}, Calls{"cuMemAllocFromPoolAsync", 0},
        Calls{"cuStreamQuery", 0}, Calls{"cuEventCreate", 0}, Calls{"cuCtxRecordEvent", 0},
        Calls{"cuStreamWaitEvent", 0}, Calls{"cuEventSynchronize", 0}, Calls{"cuMemFreeAsync", 0},
        Calls{"cuMemPoolTrimTo", 1}}) {
    for (int call = before + 1; call <= before + 3; ++call) {
      for (const char* free : {"sync", "deferred"}) faults.push_back({function, call, free});
    }
  }
  return faults;
}

class AsyncFaultTest : public AsyncTest, public testing::WithParamInterface<AsyncFault> {};
INSTANTIATE_TEST_SUITE_P(Calls, AsyncFaultTest, testing::ValuesIn(AsyncFaults()),
                         [](const auto& fault) { return fault.param.Plan('_') + "_" + fault.param.free; });

TEST_P(AsyncFaultTest, NothingIsLostAndNoBlockIsInTwoHands) {
  const std::string option = std::string("CUSHION_FREE=") + GetParam().free;
  const auto program = [&] {
    Runtime& runtime = Start({option.c_str()});
    for (int round = 0; round < 4; ++round) {
      std::vector<CUdeviceptr> blocks;
      for (int i = 0; i < 3; ++i) {
        const CUdeviceptr p = Malloc(i == 0 ? 2 * kMiB : kMiB);
        if (p == 0) continue;
        for (const CUdeviceptr other : blocks) EXPECT_NE(p, other);
        blocks.push_back(p);
      }
      for (const CUdeviceptr p : blocks) {
        if (Free(p) == CUDA_SUCCESS) continue;
        CHECK_CU(0, Free(p));
      }
      runtime.relieve(0);
    }
    CHECK_CU(0, driver().CtxSynchronize());
    EXPECT_EQ(live(), 0u);
    EXPECT_EQ(used(), 0u);
    EXPECT_GE(counters().served[static_cast<int>(Api::malloc)], 10u);
    return 0;
  };
  const harness::ChildResult child =
      harness::RunChild(GetParam().Plan('_'), program, {{"EMU_FAIL", GetParam().Plan(':') + ":999"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

}  // namespace
}  // namespace cushion
