// Context: who may have a freed block, when, and what is tried before memory is called short (contract §3, §4, §6).
#include "core/context.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;
using harness::LaunchCheck;
using harness::LaunchFill;
using harness::SharedWord;
using namespace std::chrono_literals;

bool returns_within(const std::future<CUresult>& call, std::chrono::milliseconds time) {
  return call.wait_for(time) == std::future_status::ready;
}

// ---- blocks ------------------------------------------------------------------------------------------------------

TEST_F(ContextTest, SmallBlocksAreAlignedTo512AndBigOnesTo64KiB) {
  std::vector<CUdeviceptr> blocks;
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{513}, kMiB, kMiB + 1, 3 * kMiB + 7, 2 * kMiB}) {
    const CUdeviceptr p = core().Malloc(bytes);
    ASSERT_NE(p, 0u);
    EXPECT_EQ(p % (bytes > kMiB ? 64 << 10 : 512), 0u) << bytes;
    blocks.push_back(p);
  }
  EXPECT_EQ(core().served(Api::malloc), blocks.size());
}

TEST_F(ContextTest, OneSegmentServesManyBlocks) {
  for (int i = 0; i < 100; ++i) ASSERT_NE(core().Malloc(10'000), 0u);
  EXPECT_EQ(counters().grows, 1u);
  EXPECT_EQ(core().held(), kSegment);
}

TEST_F(ContextTest, BytesAreCountedAsRequestedHandedOutAndHeld) {
  const CUdeviceptr a = core().Malloc(1'000);
  const CUdeviceptr b = core().Malloc(1);
  EXPECT_EQ(core().usage().requested.current(), 1'001u);
  EXPECT_EQ(core().usage().handed_out.current(), 1'024u + 512u);
  EXPECT_EQ(core().usage().held.current(), kSegment);
  CHECK_CU(0, core().Free(a));
  CHECK_CU(0, core().Free(b));
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().usage().handed_out.current(), 0u);
  EXPECT_EQ(core().usage().requested.peak(), 1'001u);
  EXPECT_EQ(core().frees(), 2u);
}

TEST_F(ContextTest, ASecondFreeIsAnInvalidValue) {
  const CUdeviceptr p = core().Malloc(1'000);
  Block* block = core().BlockAt(p);
  CHECK_CU(0, core().Free(p));
  CHECK_CU(1, core().FreeBlock(block, p));
  TestStream s;
  CHECK_CU(1, core().FreeBlockAsync(block, p, s, core().context()));
}

TEST_F(ContextTest, ABlockIsNotFreedByAnotherAddress) {
  const CUdeviceptr p = core().Malloc(1'000);
  CHECK_CU(1, core().FreeBlock(core().BlockAt(p), p + 512));
  CHECK_CU(0, core().Free(p));
}

TEST_F(ContextTest, NewMemoryHoldsWhatInitSays) {
  for (const auto& [mode, value] : {std::pair{InitMode::zero, 0}, std::pair{InitMode::junk, 0xFF}}) {
    core().options().init = mode;
    TestStream s;
    CUdeviceptr p = core().MallocAsync(5'000, s);
    CHECK_CU(0, LaunchFill(s, p, 5'000, 0x55));
    CHECK_CU(0, core().FreeAsync(p, s));
    ASSERT_EQ(core().MallocAsync(5'000, s), p);
    s.Finish();
    EXPECT_EQ(harness::Bytes(p, 5'000), std::vector<std::uint8_t>(5'000, static_cast<std::uint8_t>(value)));
    CHECK_CU(0, LaunchFill(s, p, 5'000, 0x55));
    CHECK_CU(0, core().Free(p));
    Synchronize();
    const CUdeviceptr q = core().Malloc(5'000);
    EXPECT_EQ(harness::Bytes(q, 5'000), std::vector<std::uint8_t>(5'000, static_cast<std::uint8_t>(value)));
    CHECK_CU(0, core().Free(q));
  }
}

TEST_F(ContextTest, MemoryThatCannotBeSetAsInitSaysIsNotServed) {
  core().options().init = InitMode::zero;
  core().shared.driver.cuMemsetD8Async = [](CUdeviceptr, unsigned char, std::size_t, CUstream) {
    return CUDA_ERROR_UNKNOWN;
  };
  TestStream s;
  EXPECT_EQ(core().Malloc(1'000), 0u);
  EXPECT_EQ(core().MallocAsync(1'000, s), 0u);
  EXPECT_EQ(core().usage().requested.current(), 0u);
}

// ---- order: cudaFree ---------------------------------------------------------------------------------------------

TEST_F(ContextTest, SyncFreeOfAnIdleContextDoesNotWaitAndReuseIsImmediate) {
  const CUdeviceptr p = core().Malloc(kSegment);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(counters().free_waits, 0u);
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, SyncFreeWaitsForEveryStreamOfItsContext) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().Free(p); });
  EXPECT_FALSE(returns_within(freed, 20ms));
  gate.Open();
  CHECK_CU(0, freed.get());
  EXPECT_FALSE(s.Busy());
  EXPECT_EQ(counters().free_waits, 1u);
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, ASecondFreeWhileTheFirstWaitsIsAnInvalidValue) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  Block* block = core().BlockAt(p);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().FreeBlock(block, p); });
  while (block->state() != BlockState::freeing) std::this_thread::yield();
  CHECK_CU(1, core().FreeBlock(block, p));
  gate.Open();
  CHECK_CU(0, freed.get());
}

TEST_F(ContextTest, DeferredFreeReturnsAtOnceAndReuseWaitsForTheWholeContext) {
  core().options().free = FreeMode::deferred;
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  CHECK_CU(0, core().Free(p));
  EXPECT_TRUE(s.Busy());
  const CUdeviceptr q = core().Malloc(kSegment);
  EXPECT_NE(q, p);
  const CUdeviceptr r = core().MallocAsync(kSegment, s);
  EXPECT_NE(r, p);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().Malloc(kSegment), p);
  EXPECT_EQ(counters().free_waits, 0u);
}

TEST_F(ContextTest, FreeOfAStreamOrderedBlockDoesNotWaitAndGoesThroughAFence) {
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(t);  // not even p's stream: the fence covers the context
  CHECK_CU(0, core().Free(p));
  EXPECT_TRUE(t.Busy());
  EXPECT_NE(core().MallocAsync(kSegment, s), p);
  gate.Open();
  t.Finish();
  EXPECT_EQ(core().MallocAsync(kSegment, s), p);
}

// ---- order: cudaFreeAsync ----------------------------------------------------------------------------------------

TEST_F(ContextTest, TheSameStreamHasItsFreedBlockAtOnce) {
  TestStream s;
  Gate gate;
  gate.Hold(s);
  const CUdeviceptr p = core().MallocAsync(100'000, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_EQ(core().MallocAsync(100'000, s), p);
}

TEST_F(ContextTest, AFreeAsyncOfAHostOrderedBlockIsStreamOrdered) {
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_TRUE(s.Busy());
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  EXPECT_EQ(core().MallocAsync(kSegment, s), p);
}

TEST_F(ContextTest, AnotherStreamHasItOnlyOnceItsWorkIsComplete) {
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

TEST_F(ContextTest, CudaMallocHasItOnlyOnceItsWorkIsComplete) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_NE(core().Malloc(kSegment), p);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, GrowthComesBeforeAnyWait) {
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  ASSERT_NE(core().MallocAsync(kSegment, t), 0u);
  EXPECT_FALSE(t.Busy());
  EXPECT_EQ(counters().grows, 2u);
  EXPECT_EQ(counters().stream_waits, 0u);
  EXPECT_EQ(counters().memory_waits, 0u);
}

TEST_F(ContextTest, AStreamThatTheProgramOrderedAfterTheFreeHasItAtOnce) {
  TestStream s;
  TestStream t;
  Gate gate;
  gate.Hold(s);
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const CUdeviceptr late = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  const Context::Position position = core().context().position(s.identity.id);
  CHECK_CU(0, core().FreeAsync(late, s));
  core().context().order_after(t.identity, position);
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
  const CUdeviceptr other = core().MallocAsync(kSegment, t);  // freed after the record: not ordered
  EXPECT_NE(other, late);
  EXPECT_EQ(core().MallocAsync(kSegment, s), late);
}

TEST_F(ContextTest, OrderIsTransitive) {
  TestStream s;
  TestStream t;
  TestStream u;
  Gate gate;
  gate.Hold(s);
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().context().order_after(t.identity, core().context().position(s.identity.id));
  core().context().order_after(u.identity, core().context().position(t.identity.id));
  EXPECT_EQ(core().MallocAsync(kSegment, u), p);
}

TEST_F(ContextTest, AStreamWithoutFreesHasNoPosition) {
  TestStream s;
  EXPECT_EQ(core().context().position(s.identity.id).serial, 0u);
}

TEST_F(ContextTest, AnOrderFromBeforeAResetSaysNothing) {
  TestStream s;
  TestStream t;
  CHECK_CU(0, core().FreeAsync(core().MallocAsync(kSegment, s), s));
  const Context::Position old = core().context().position(s.identity.id);
  ASSERT_NE(old.serial, 0u);
  core().context().discard();
  core().context().revive();
  core().context().order_after(t.identity, old);
  EXPECT_EQ(core().context().position(t.identity.id).serial, 0u);
}

TEST_F(ContextTest, AStreamThatComesAgainUnderItsHandleIsAnother) {
  TestStream s;
  Gate gate;
  gate.Hold(s);
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().context().stream_going(s.identity);
  const StreamIdentity again{s.identity.handle, s.identity.id + 1'000, 0};
  CUdeviceptr q = 0;
  ASSERT_TRUE(core().context().allocate({kSegment, Api::malloc_async, &again}, &q));
  EXPECT_NE(q, p);
}

TEST_F(ContextTest, ADestroyedStreamsBlocksComeBackOnceItsWorkIsComplete) {
  TestStream s;
  TestStream t;
  Gate gate;
  gate.Hold(s);
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().context().stream_going(s.identity);
  s.stream.Destroy();
  EXPECT_EQ(core().shared.stream_lanes, 0);
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  gate.Open();
  Synchronize();
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

TEST_F(ContextTest, TheProgramsSynchronizeCleansWhatWasFreedBeforeItWasCalled) {
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const CUdeviceptr late = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  const std::uint64_t stamp = core().context().advance();
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(late, s));
  core().context().synchronized(stamp, core().context().generation());
  EXPECT_EQ(core().Malloc(kSegment), p);
  EXPECT_NE(core().Malloc(kSegment), late);
}

TEST_F(ContextTest, ABlockFreedOnAnotherContextsStreamWaitsForThatStream) {
  core().context();
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  CHECK_CU(0, driver().CtxGetCurrent(&first));
  const CUdeviceptr p = core().Malloc(kSegment);
  REQUIRE_CU(0, driver().CtxCreate(&second, 0, 0));
  {
    Context& other = core().Add(0);
    TestStream s;
    Gate gate;
    gate.Hold(s);
    CHECK_CU(0, core().FreeBlockAsync(core().BlockAt(p), p, s, other));
    CHECK_CU(0, driver().CtxSetCurrent(first));
    EXPECT_NE(core().Malloc(kSegment), p);
    gate.Open();
    s.Finish();
    EXPECT_EQ(core().Malloc(kSegment), p);
  }
  CHECK_CU(0, driver().CtxDestroy(second));
  CHECK_CU(0, driver().CtxSetCurrent(first));
}

TEST_F(ContextTest, WithPeersASyncFreeWaitsForItsOwnContextAndReuseForAll) {
  core().context();
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  CHECK_CU(0, driver().CtxGetCurrent(&first));
  const CUdeviceptr p = core().Malloc(kSegment);
  REQUIRE_CU(0, driver().CtxCreate(&second, 0, 0));
  {
    core().Add(0);
    core().shared.peers = true;
    TestStream s;
    Gate gate;
    gate.Hold(s);
    CHECK_CU(0, driver().CtxSetCurrent(first));
    CHECK_CU(0, core().Free(p));
    EXPECT_TRUE(s.Busy());
    EXPECT_NE(core().Malloc(kSegment), p);
    gate.Open();
    s.Finish();
    EXPECT_EQ(core().Malloc(kSegment), p);
  }
  CHECK_CU(0, driver().CtxDestroy(second));
  CHECK_CU(0, driver().CtxSetCurrent(first));
}

// Runs once, inside a driver call of core's, as another thread might at that moment. (No lock is held then.)
std::function<void()> g_meanwhile;

void meanwhile() {
  if (g_meanwhile) std::exchange(g_meanwhile, nullptr)();
}

TEST_F(ContextTest, AFenceCleansNothingThatWasFreedWhileItWasRecorded) {
  TestStream s;
  Gate gate;
  const CUdeviceptr early = core().MallocAsync(kSegment, s);
  const CUdeviceptr late = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(early, s));
  g_meanwhile = [&] {
    gate.Hold(s);
    CHECK_CU(0, core().FreeAsync(late, s));
  };
  core().shared.driver.cuCtxRecordEvent = [](CUcontext context, CUevent event) {
    const CUresult result = driver().CtxRecordEvent(context, event);
    meanwhile();
    return result;
  };
  EXPECT_EQ(core().Malloc(kSegment), early);
  EXPECT_TRUE(s.Busy());
  EXPECT_NE(core().Malloc(kSegment), late);
}

// ---- memory is short ---------------------------------------------------------------------------------------------

TEST_F(ContextTest, BeyondMaxSizeRequestsAreForwarded) {
  core().options().max_size.bytes = 2 * kSegment;
  core().options().max_size.percent = -1;
  ASSERT_NE(core().Malloc(kSegment), 0u);
  ASSERT_NE(core().Malloc(kSegment), 0u);
  EXPECT_EQ(core().Malloc(kSegment), 0u);
  EXPECT_EQ(core().Malloc(5 * kSegment), 0u);
  EXPECT_EQ(core().held(), 2 * kSegment);
  EXPECT_EQ(counters().out_of_memory, 0u);
}

TEST_F(ContextTest, MaxSizeCountsWhatIsBeingAskedOfTheDriver) {
  core().options().max_size = {kSegment, -1};
  g_meanwhile = [&] { EXPECT_EQ(core().Malloc(kSegment), 0u); };
  core().shared.driver.cuMemAlloc_v2 = [](CUdeviceptr* out, std::size_t bytes) {
    meanwhile();
    return driver().MemAlloc(out, bytes);
  };
  EXPECT_NE(core().Malloc(kSegment), 0u);
  EXPECT_EQ(core().held(), kSegment);
}

TEST_F(ContextTest, MoreThanTheDeviceHasIsForwardedAtOnce) {
  EXPECT_EQ(core().Malloc(std::uint64_t{1} << 50), 0u);
  EXPECT_EQ(core().Malloc(~std::uint64_t{0}), 0u);
  EXPECT_EQ(counters().grows, 0u);
}

TEST_F(ContextTest, LargeRequestsAtMostDoubleWhatIsHeldUpToABound) {
  core().options().growth_max.bytes = 4 * kSegment;
  std::uint64_t before = 0;
  std::uint64_t largest = 0;
  for (int i = 0; i < 100; ++i) {
    ASSERT_NE(core().Malloc(kSegment), 0u);
    const std::uint64_t step = core().held() - before;
    EXPECT_LE(step, std::max(kSegment, before));
    largest = std::max(largest, step);
    before = core().held();
  }
  EXPECT_EQ(largest, 4 * kSegment);
}

TEST_F(ContextTest, SmallRequestsGrowByAShareOfWhatIsHeld) {
  core().options().growth_max.bytes = 64 * kSegment;
  std::uint64_t before = 0;
  std::uint64_t largest = 0;
  while (before < 200 * kSegment) {
    ASSERT_NE(core().Malloc(64 << 10), 0u);
    const std::uint64_t step = core().held() - before;
    EXPECT_LE(step, kSegment + before / 32);
    largest = std::max(largest, step);
    before = core().held();
  }
  EXPECT_GT(largest, 4 * kSegment);
}

TEST_F(ContextTest, InitialSizeIsTakenOnce) {
  core().options().initial_size.bytes = 8 * kSegment;
  ASSERT_NE(core().Malloc(1), 0u);
  EXPECT_EQ(core().held(), 8 * kSegment);
  ASSERT_NE(core().Malloc(8 * kSegment), 0u);
  EXPECT_EQ(core().held(), 16 * kSegment);
}

TEST_F(ContextTest, SpeculativeGrowthLeavesTheReserveAndFallsBackToTheNeed) {
  core().options().segment_size.bytes = 64 * kMiB;
  const Hog hog(256 * kMiB);
  ASSERT_NE(core().Malloc(1), 0u);
  EXPECT_EQ(core().held(), kSegment);
}

TEST_F(ContextTest, UnderPressureAnotherStreamsBlockIsTakenWithAWaitForItsFreeAlone) {
  TestStream s;
  TestStream t;
  SharedWord bad;
  Gate before;
  Gate after;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  core().refuse_growth();
  ASSERT_EQ(core().MallocAsync(kSegment, t), 0u);  // refused: from now on frees carry an event
  CHECK_CU(0, LaunchFill(s, p, kSegment, 1));
  before.Hold(s);
  CHECK_CU(0, LaunchCheck(s, p, kSegment, 1, bad.on_device()));
  CHECK_CU(0, core().FreeAsync(p, s));
  after.Hold(s);
  ASSERT_EQ(core().MallocAsync(kSegment, t), p);
  EXPECT_EQ(counters().stream_waits, 1u);
  CHECK_CU(0, LaunchFill(t, p, kSegment, 2));
  EXPECT_TRUE(t.Busy());
  before.Open();
  t.Finish();  // not for what s was given after its free
  EXPECT_TRUE(s.Busy());
  EXPECT_EQ(bad.Get(), 0u);
}

// Where the driver still has memory the request is its own: the work before a free may be waiting for the stream.
TEST_F(ContextTest, AtMaxSizeNoStreamIsMadeToWait) {
  core().options().max_size = {kSegment, -1};
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  ASSERT_EQ(core().MallocAsync(kSegment, t), 0u);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_EQ(core().MallocAsync(kSegment, t), 0u);
  EXPECT_FALSE(t.Busy());
  EXPECT_EQ(counters().stream_waits, 0u);
  EXPECT_EQ(counters().memory_waits, 0u);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

TEST_F(ContextTest, UnderPressureAStreamHasItsOwnBlockWithoutAWait) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  core().refuse_growth();
  ASSERT_EQ(core().MallocAsync(kSegment, s), 0u);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_EQ(core().MallocAsync(100'000, s), p);
  EXPECT_EQ(core().MallocAsync(100'000, s), p + round_up(100'000, kUnit));
  EXPECT_EQ(counters().stream_waits, 0u);
}

TEST_F(ContextTest, CudaMallocNeverTakesABlockByAStreamWait) {
  core().options().oom_wait = {};
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  core().refuse_growth();
  ASSERT_EQ(core().MallocAsync(kSegment, s), 0u);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_EQ(core().Malloc(kSegment), 0u);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, OutOfMemoryWaitsForFreedBlocksNoLongerThanOomWait) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const Hog hog(0);
  CHECK_CU(0, core().FreeAsync(p, s));
  gate.Hold(s);  // after the free: a fence recorded now would wait for it, and only the host opens it
  const harness::Stopwatch watch;
  EXPECT_EQ(core().Malloc(kSegment), 0u);
  EXPECT_GE(watch.Milliseconds(), 50);
  EXPECT_EQ(counters().memory_waits, 1u);
  EXPECT_EQ(counters().out_of_memory, 1u);
  gate.Open();
}

TEST_F(ContextTest, AWaitEndsWhenTheBlockIsComplete) {
  core().options().oom_wait.ns = 10'000 * harness::kMillisecond;
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const Hog hog(0);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  std::future<CUdeviceptr> q = std::async(std::launch::async, [&] { return core().Malloc(kSegment); });
  while (counters().memory_waits == 0) std::this_thread::yield();
  gate.Open();
  EXPECT_EQ(q.get(), p);
}

TEST_F(ContextTest, NothingIsWaitedForThatCouldNotHelp) {
  core().options().oom_wait.ns = 60'000 * harness::kMillisecond;
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const Hog hog(0);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_EQ(core().Malloc(2 * kSegment), 0u);
  EXPECT_EQ(counters().memory_waits, 0u);
  EXPECT_EQ(counters().out_of_memory, 1u);
  gate.Open();
}

TEST_F(ContextTest, UnusedSegmentsGoBackBeforeMemoryIsCalledShort) {
  const CUdeviceptr a = core().Malloc(kSegment);
  const CUdeviceptr b = core().Malloc(kSegment);
  const Hog hog(0);
  CHECK_CU(0, core().Free(a));
  CHECK_CU(0, core().Free(b));
  const CUdeviceptr big = core().Malloc(2 * kSegment);
  EXPECT_NE(big, 0u);
  EXPECT_EQ(counters().releases, 2u);
  EXPECT_EQ(core().held(), 2 * kSegment);
  EXPECT_EQ(core().usage().held.current(), 2 * kSegment);
}

TEST_F(ContextTest, ASegmentThatWentBackIsNoLongerOurs) {
  const CUdeviceptr p = core().Malloc(kSegment);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(core().context().unused(), kSegment);
  EXPECT_EQ(core().context().relieve(0), 1u);
  EXPECT_EQ(core().shared.map.find(p), nullptr);
  EXPECT_EQ(core().held(), 0u);
  CHECK_CU(1, driver().MemFree(p));
}

TEST_F(ContextTest, NothingGoesBackWhileAKernelRuns) {
  CHECK_CU(0, core().Free(core().Malloc(kSegment)));
  TestStream s;
  Gate gate;
  gate.Hold(s);
  EXPECT_EQ(core().context().relieve(0), 0u);
  EXPECT_TRUE(s.Busy());
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().context().relieve(0), 1u);
}

TEST_F(ContextTest, ASegmentWithALiveBlockStays) {
  CHECK_CU(0, core().Free(core().Malloc(kSegment / 2)));
  ASSERT_NE(core().Malloc(1), 0u);
  EXPECT_EQ(core().context().relieve(0), 0u);
  EXPECT_EQ(core().held(), kSegment);
}

TEST_F(ContextTest, AtTheProgramsSynchronizeWhatIsUnusedAboveTheThresholdGoesBack) {
  core().options().release_threshold = {kSegment, -1};
  std::vector<CUdeviceptr> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(core().Malloc(kSegment));
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().Free(p));
  EXPECT_EQ(core().held(), 4 * kSegment);
  core().context().synchronized(core().context().advance(), core().context().generation());
  EXPECT_EQ(core().held(), kSegment);
}

// ---- capture -----------------------------------------------------------------------------------------------------

class ContextCaptureTest : public ContextTest {
 protected:
  void Begin(CUstream stream) {
    core().shared.gate.begin();
    const CUresult result = driver().StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    core().shared.gate.begun(stream, core().context().handle(), 0, result == CUDA_SUCCESS);
    REQUIRE_CU(0, result);
  }
  CUresult End(CUstream stream) {
    CUgraph graph = nullptr;
    const CUresult result = driver().StreamEndCapture(stream, &graph);
    if (graph != nullptr) driver().GraphDestroy(graph);
    core().shared.gate.refresh(core().shared.driver, 0);
    return result;
  }
};

TEST_F(ContextCaptureTest, ACaptureSurvivesWhateverCoreDoes) {
  core().options().max_size = {4 * kSegment, -1};
  TestStream s;
  TestStream t;
  TestStream c;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const CUdeviceptr q = core().Malloc(kSegment);
  Begin(c);
  const CUdeviceptr r = core().Malloc(kSegment);  // grows
  ASSERT_NE(r, 0u);
  ASSERT_NE(core().MallocAsync(kSegment, t), 0u);
  EXPECT_EQ(core().Malloc(kSegment), 0u);  // refused, and asks the fences first
  CHECK_CU(0, core().FreeAsync(p, s));
  CHECK_CU(0, core().Free(q));  // waits for the context
  CHECK_CU(0, core().Free(r));
  EXPECT_EQ(core().context().relieve(harness::kMillisecond), 0u);
  core().context().synchronized(core().context().advance(), core().context().generation());
  EXPECT_NE(core().Malloc(kSegment), 0u);
  CHECK_CU(0, End(c));
  EXPECT_TRUE(core().shared.gate.enter());
  core().shared.gate.leave();
}

TEST_F(ContextCaptureTest, ASyncFreeBesideACaptureWaitsForRunningWork) {
  TestStream s;
  TestStream c;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  Begin(c);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().Free(p); });
  EXPECT_FALSE(returns_within(freed, 20ms));
  gate.Open();
  CHECK_CU(0, freed.get());
  CHECK_CU(0, End(c));
}

TEST_F(ContextCaptureTest, FreedBlocksAreNotWaitedForWhileACaptureIsOpen) {
  core().options().oom_wait.ns = 60'000 * harness::kMillisecond;
  TestStream s;
  TestStream c;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  const Hog hog(0);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  Begin(c);
  EXPECT_EQ(core().Malloc(kSegment), 0u);
  EXPECT_EQ(counters().memory_waits, 0u);
  CHECK_CU(0, End(c));
  gate.Open();
}

// ---- contexts that end -------------------------------------------------------------------------------------------

TEST_F(ContextTest, DiscardForgetsEverythingAndTheContextServesAgain) {
  TestStream s;
  const CUdeviceptr p = core().Malloc(1'000);
  Block* block = core().BlockAt(p);
  CHECK_CU(0, core().FreeAsync(core().MallocAsync(kSegment, s), s));
  const std::uint64_t generation = core().context().generation();
  Context& context = core().context();
  context.closing(true);
  EXPECT_EQ(core().Malloc(1), 0u);
  REQUIRE_CU(0, driver().DevicePrimaryCtxReset(0));
  context.discard();
  context.closing(false);

  EXPECT_FALSE(context.alive());
  EXPECT_GT(context.generation(), generation);
  EXPECT_EQ(core().shared.map.find(p), nullptr);
  CHECK_CU(1, core().FreeBlock(block, p));
  EXPECT_EQ(core().held(), 0u);
  EXPECT_EQ(core().usage().held.current(), 0u);
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().usage().handed_out.current(), 0u);
  EXPECT_EQ(core().shared.stream_lanes, 0);
  EXPECT_EQ(counters().reset_blocks, 1u);
  EXPECT_EQ(counters().reset_bytes, 1'000u);

  CUcontext again = nullptr;
  REQUIRE_CU(0, driver().DevicePrimaryCtxRetain(&again, 0));
  context.revive();
  const CUdeviceptr q = core().Malloc(1'000);
  ASSERT_NE(q, 0u);
  CHECK_CU(0, core().Free(q));
  driver().DevicePrimaryCtxRelease(0);
}

TEST_F(ContextTest, AFreeThatADiscardOvertakesEndsWell) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(1'000);
  Block* block = core().BlockAt(p);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().FreeBlock(block, p); });
  while (block->state() != BlockState::freeing) std::this_thread::yield();
  core().context().discard();
  core().context().revive();
  const CUdeviceptr q = core().Malloc(1'000);  // perhaps in the very same record
  gate.Open();
  CHECK_CU(0, freed.get());
  EXPECT_NE(q, 0u);
  CHECK_CU(0, core().Free(q));
  EXPECT_EQ(core().usage().requested.current(), 0u);
}

TEST_F(ContextTest, AnEventOfAResetContextIsNotRecordedAgain) {
  static std::atomic<int> stale;
  static CUevent first;
  stale = 0;
  first = nullptr;
  core().shared.driver.cuCtxRecordEvent = [](CUcontext context, CUevent event) {
    if (first == nullptr) first = event;
    if (first != event) ++stale;
    return driver().CtxRecordEvent(context, event);
  };
  for (int i = 0; i < 3; ++i) CHECK_CU(0, core().Free(core().Malloc(1'000)));
  EXPECT_EQ(stale, 0);  // one spare event serves them all
  REQUIRE_CU(0, driver().DevicePrimaryCtxReset(0));
  core().context().discard();
  CUcontext again = nullptr;
  REQUIRE_CU(0, driver().DevicePrimaryCtxRetain(&again, 0));
  core().context().revive();
  CHECK_CU(0, core().Free(core().Malloc(1'000)));
  driver().DevicePrimaryCtxRelease(0);
}

TEST_F(ContextTest, AFreeThatAResetFailsTouchesNothing) {
  const CUdeviceptr p = core().Malloc(1'000);
  g_meanwhile = [&] {
    core().context().discard();
    core().context().revive();
    EXPECT_NE(core().Malloc(1'000), 0u);  // the block's record serves again, for another block
  };
  core().shared.driver.cuEventSynchronize = [](CUevent) {
    meanwhile();
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  };
  CHECK_CU(CUDA_ERROR_CONTEXT_IS_DESTROYED, core().Free(p));
  EXPECT_TRUE(core().valid());
}

TEST_F(ContextTest, AResetDuringGrowthNeverFreesWhatIsNoLongerOurs) {
  CUdeviceptr theirs = 0;
  g_meanwhile = [&] {
    REQUIRE_CU(0, driver().DevicePrimaryCtxReset(0));
    core().context().discard();
    CUcontext again = nullptr;
    REQUIRE_CU(0, driver().DevicePrimaryCtxRetain(&again, 0));
    core().context().revive();
    CHECK_CU(0, driver().MemAlloc(&theirs, kSegment));
  };
  core().shared.driver.cuMemAlloc_v2 = [](CUdeviceptr* out, std::size_t bytes) {
    const CUresult result = driver().MemAlloc(out, bytes);
    meanwhile();
    return result;
  };
  core().Malloc(kSegment);
  CHECK_CU(0, driver().MemFree(theirs));
  driver().DevicePrimaryCtxRelease(0);
}

// ---- a driver that answers errors --------------------------------------------------------------------------------

TEST_F(ContextTest, AnErrorFromAFenceMakesNothingClean) {
  TestStream s;
  TestStream t;
  const auto real = core().shared.driver.cuEventQuery;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().shared.driver.cuEventQuery = [](CUevent) { return CUDA_ERROR_UNKNOWN; };
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  EXPECT_NE(core().Malloc(kSegment), p);
  core().shared.driver.cuEventQuery = real;
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, AFenceThatCannotBeRecordedMakesNothingClean) {
  TestStream s;
  const auto real = core().shared.driver.cuCtxRecordEvent;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().shared.driver.cuCtxRecordEvent = [](CUcontext, CUevent) { return CUDA_ERROR_NOT_PERMITTED; };
  EXPECT_NE(core().Malloc(kSegment), p);
  core().shared.driver.cuCtxRecordEvent = real;
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(ContextTest, ASyncFreeWhoseFenceFailsReturnsThatCodeAndTheBlockStaysLive) {
  const CUdeviceptr p = core().Malloc(kSegment);
  const auto record = core().shared.driver.cuCtxRecordEvent;
  core().shared.driver.cuCtxRecordEvent = [](CUcontext, CUevent) { return CUDA_ERROR_NOT_PERMITTED; };
  CHECK_CU(CUDA_ERROR_NOT_PERMITTED, core().Free(p));
  core().shared.driver.cuCtxRecordEvent = record;
  const auto wait = core().shared.driver.cuEventSynchronize;
  core().shared.driver.cuEventSynchronize = [](CUevent) { return CUDA_ERROR_UNKNOWN; };
  CHECK_CU(CUDA_ERROR_UNKNOWN, core().Free(p));
  core().shared.driver.cuEventSynchronize = wait;
  EXPECT_NE(core().Malloc(kSegment), p);
  CHECK_CU(0, core().Free(p));
}

TEST_F(ContextTest, AStreamWaitThatFailsTakesNothing) {
  core().options().oom_wait = {};
  TestStream s;
  TestStream t;
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  core().refuse_growth();
  ASSERT_EQ(core().MallocAsync(kSegment, t), 0u);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  const auto real = core().shared.driver.cuStreamWaitEvent;
  core().shared.driver.cuStreamWaitEvent = [](CUstream, CUevent, unsigned) { return CUDA_ERROR_UNKNOWN; };
  EXPECT_EQ(core().MallocAsync(kSegment, t), 0u);
  core().shared.driver.cuStreamWaitEvent = real;
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

TEST_F(ContextTest, AfterAStickyErrorNothingIsServedUntilTheContextIsReset) {
  const CUdeviceptr p = core().Malloc(1'000);
  const CUdeviceptr q = core().Malloc(1'000);
  const auto real = core().shared.driver.cuEventSynchronize;
  core().shared.driver.cuEventSynchronize = [](CUevent) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  CHECK_CU(700, core().Free(p));
  core().shared.driver.cuEventSynchronize = real;
  CHECK_CU(700, core().context().broken());
  CHECK_CU(700, core().Free(q));
  TestStream s;
  CHECK_CU(700, core().FreeAsync(q, s));
  EXPECT_EQ(core().Malloc(1), 0u);
  core().context().discard();
  core().context().revive();
  EXPECT_NE(core().Malloc(1), 0u);
}

// ---- drivers without cuCtxRecordEvent (before 12.5) --------------------------------------------------------------

class OldDriverTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (!IsSkipped()) core().shared.driver.cuCtxRecordEvent = nullptr;
  }
  // As the hook of stream creation does.
  void Known(const TestStream& lane) { core().shared.streams.add(lane, core().context().handle()); }
};

TEST_F(OldDriverTest, SyncFreeWaitsForEveryStream) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().Free(p); });
  EXPECT_FALSE(returns_within(freed, 20ms));
  gate.Open();
  CHECK_CU(0, freed.get());
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(OldDriverTest, DeferredFreesWaitBecauseNoFenceWouldBringThemBack) {
  core().options().free = FreeMode::deferred;
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().Free(p); });
  EXPECT_FALSE(returns_within(freed, 20ms));
  gate.Open();
  CHECK_CU(0, freed.get());
}

TEST_F(OldDriverTest, AStreamsBlocksComeBackOnceThatStreamIsIdle) {
  TestStream s;
  TestStream t;
  TestStream busy;
  for (const TestStream* lane : {&s, &t, &busy}) Known(*lane);
  Gate gate;
  Gate other;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(s);
  other.Hold(busy);
  CHECK_CU(0, core().FreeAsync(p, s));
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  gate.Open();
  s.Finish();
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

TEST_F(OldDriverTest, PendingBlocksComeBackOnceEveryStreamIsIdle) {
  TestStream s;
  TestStream t;
  Known(s);
  Known(t);
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(t);
  CHECK_CU(0, core().Free(p));
  EXPECT_NE(core().Malloc(kSegment), p);
  gate.Open();
  t.Finish();
  EXPECT_EQ(core().Malloc(kSegment), p);
}

TEST_F(OldDriverTest, WithAStreamThatIsNotKnownNothingIsCalledIdle) {
  TestStream s;
  core().shared.streams.lose();
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  CHECK_CU(0, core().Free(p));
  EXPECT_NE(core().Malloc(kSegment), p);
  EXPECT_EQ(core().context().relieve(0), 0u);
}

TEST_F(OldDriverTest, WithPeersNothingIsServedAndWhatIsFreedGoesBack) {
  const CUdeviceptr p = core().Malloc(kSegment);
  core().shared.peers = true;
  EXPECT_EQ(core().Malloc(1'000), 0u);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(core().held(), 0u);
}

// IDLE_RELEASE: an allocation or free looks, at most once in that time, and what was free all the while goes back.
TEST_F(ContextTest, WhatNobodyUsesGoesBackAfterItsTime) {
  core().options().idle_release.ns = 20'000'000;
  const auto look = [&] {  // a miss: no magazine has such a block
    std::this_thread::sleep_for(25ms);
    const CUdeviceptr p = core().Malloc(3 * kSegment);
    CHECK_CU(0, core().Free(p));
  };
  const CUdeviceptr kept = core().Malloc(512);
  const CUdeviceptr idle = core().Malloc(40 * kSegment);
  look();
  CHECK_CU(0, core().Free(idle));
  look();  // it was used within this time
  EXPECT_GE(core().held(), 40 * kSegment);
  look();
  EXPECT_LE(core().held(), 8 * kSegment);  // what the look itself uses
  EXPECT_GE(core().held(), kSegment);
  CHECK_CU(0, core().Free(kept));
}

TEST_F(ContextTest, WhatIsUsedNowAndThenStays) {
  core().options().idle_release.ns = 20'000'000;
  for (int i = 0; i < 4; ++i) {
    CHECK_CU(0, core().Free(core().Malloc(40 * kSegment)));
    std::this_thread::sleep_for(25ms);
  }
  EXPECT_GE(core().held(), 40 * kSegment);
  EXPECT_EQ(counters().releases, 0u);
}

TEST_F(OldDriverTest, ASyncFreeOnAFullDeviceWaitsAllTheSame) {
  TestStream s;
  Gate gate;
  const CUdeviceptr p = core().Malloc(kSegment);
  const Hog hog(0);
  gate.Hold(s);
  std::future<CUresult> freed = std::async(std::launch::async, [&] { return core().Free(p); });
  EXPECT_FALSE(returns_within(freed, 20ms));
  gate.Open();
  CHECK_CU(0, freed.get());
}

TEST_F(OldDriverTest, ADestroyedStreamsBlocksComeBackOnceItsWorkIsComplete) {
  TestStream s;
  TestStream t;
  Known(t);
  Gate gate;
  const CUdeviceptr p = core().MallocAsync(kSegment, s);
  gate.Hold(s);
  CHECK_CU(0, core().FreeAsync(p, s));
  core().context().stream_going(s.identity);
  s.stream.Destroy();
  EXPECT_NE(core().MallocAsync(kSegment, t), p);
  gate.Open();
  Synchronize();
  EXPECT_EQ(core().MallocAsync(kSegment, t), p);
}

}  // namespace
}  // namespace cushion
