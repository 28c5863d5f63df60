// Contract §3, order: when a freed block may be handed out again, and what a free waits for.
//
// A block handed out too early is found by a kernel that writes its block, holds it for 20 ms and counts the
// bytes that changed meanwhile, while whoever allocates next fills what it got at once.
#include <algorithm>
#include <array>
#include <functional>
#include <latch>
#include <set>
#include <thread>

#include "tests/contract/contract.h"

namespace {

using namespace contract;

class Order : public Contract {};

#define SKIP_IF_DEFERRED() \
  if (deferred()) GTEST_SKIP() << "CUSHION_FREE=deferred gives up the wait of cuMemFree"

// --- What a free waits for ---------------------------------------------------------------------------------

constexpr CUstream legacy = nullptr;

TEST_F(Order, FreeWaitsForEveryStreamOfItsContext) {
  SKIP_IF_DEFERRED();
  const Stream blocking(CU_STREAM_DEFAULT), non_blocking;
  for (const CUstream stream :
       {legacy, CU_STREAM_LEGACY, CUstream{blocking}, CUstream{non_blocking}, CU_STREAM_PER_THREAD}) {
    const CUdeviceptr p = allocate(KiB);
    hold(stream, 20ms);
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    EXPECT_FALSE(busy(stream)) << stream;
  }
}

// Measured: a free and an allocation on a blocking stream come after the legacy stream's work, so that memory is idle
// once the stream is synchronised.
TEST_F(Order, ABlockThatTheLegacyStreamUsesComesBackFromABlockingStreamAfterIt) {
  const Stream blocking(CU_STREAM_DEFAULT), other;
  const SharedWord bad;
  hold(legacy, 0ms);  // kernels run on the legacy stream
  finish(legacy);
  const CUdeviceptr p = allocate_async(MiB, blocking);
  fill(legacy, p, MiB, 1, 60ms);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, blocking));
  const CUdeviceptr q = allocate_async(MiB, blocking);
  finish(blocking);
  fill_hold_check(other, q, MiB, 2, 90ms, bad);
  finish(other);
  EXPECT_EQ(bad.Get(), 0u);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, blocking));
  finish(legacy);
}

TEST_F(Order, FreeWaitsForAnotherThreadsPerThreadStream) {
  SKIP_IF_DEFERRED();
  const CUdeviceptr p = allocate(KiB);
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::latch launched{1}, freed{1};
  std::thread other([&] {
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
    hold(CU_STREAM_PER_THREAD, 20ms);
    launched.count_down();
    freed.wait();
    EXPECT_FALSE(busy(CU_STREAM_PER_THREAD));
  });
  launched.wait();
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  freed.count_down();
  other.join();
}

TEST_F(Order, FreeWaitsForADestroyedStream) {
  SKIP_IF_DEFERRED();
  SharedWord done;
  const CUdeviceptr p = allocate(KiB);
  Stream stream;
  fill(stream, done.on_device(), 4, 1, 20ms);
  stream.Destroy();
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  EXPECT_EQ(done.Get(), 0x01010101U);
}

TEST_F(Order, DeferredFreeDoesNotWait) {
  if (!deferred()) GTEST_SKIP() << "a promise of CUSHION_FREE=deferred";
  SharedWord flag;
  const Stream stream;
  const CUdeviceptr p = allocate(KiB);
  wait_flag(stream, flag);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  finish(stream);
}

TEST_F(Order, AllocateDoesNotWait) {
  SharedWord flag;
  const Stream stream, other;
  wait_flag(stream, flag);
  const CUdeviceptr small = allocate(KiB), large = allocate(40 * MiB), async = allocate_async(40 * MiB, other);
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  finish(stream);
  for (const CUdeviceptr p : {small, large, async}) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Order, FreeOfAnAsyncPointerDoesNotWait) {
  SharedWord flag;
  const Stream stream, other;
  const CUdeviceptr p = allocate_async(MiB, other);
  finish(other);
  wait_flag(stream, flag);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  finish(stream);
}

TEST_F(Order, FreeAsyncOfASyncPointerDoesNotWait) {
  SharedWord flag;
  const Stream stream;
  const CUdeviceptr p = allocate(MiB);
  wait_flag(stream, flag);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  finish(stream);
}

TEST_F(Order, FreeWaitsForTheBlocksOwnContextOnly) {
  CUcontext primary = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&primary));
  const CUdeviceptr p = allocate(KiB);
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxCreate(&context, 0, 0));
  {
    SharedWord flag;
    const Stream stream;
    CHECK_CU(CUDA_SUCCESS, harness::LoadKernels());
    wait_flag(stream, flag);
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    EXPECT_TRUE(busy(stream));
    flag.Set(1);
    finish(stream);
  }
  CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(context));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
  CHECK_CU(CUDA_SUCCESS, harness::LoadKernels());
}

// --- What programs get from that wait ----------------------------------------------------------------------

TEST_F(Order, FreeOrdersTwoStreams) {
  SKIP_IF_DEFERRED();
  const std::size_t size = MiB;
  SharedWord bad;
  const Stream first, second;
  const CUdeviceptr x = allocate(size), y = allocate(size), anything = allocate(KiB);
  fill(first, x, size, 0x5a, 20ms);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(anything));
  copy(second, y, x, size);
  check(second, y, size, 0x5a, bad);
  finish(second);
  EXPECT_EQ(bad.Get(), 0U);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(x));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(y));
}

TEST_F(Order, MappedMemoryIsCompleteAfterFree) {
  SKIP_IF_DEFERRED();
  SharedWord word;
  const Stream stream;
  const CUdeviceptr p = allocate(KiB);
  fill(stream, word.on_device(), 4, 0x11, 20ms);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  EXPECT_EQ(word.Get(), 0x11111111U);
}

TEST_F(Order, ElapsedTimeRightAfterFree) {
  SKIP_IF_DEFERRED();
  const Stream stream;
  const Event begin(CU_EVENT_DEFAULT), end(CU_EVENT_DEFAULT);
  const CUdeviceptr p = allocate(KiB);
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(begin, stream));
  hold(stream, 20ms);
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(end, stream));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().EventQuery(end));
  float ms = 0;
  CHECK_CU(CUDA_SUCCESS, driver().EventElapsedTime(&ms, begin, end));
  EXPECT_GE(ms, 15.0F);
}

SCENARIO(free_returns_asynchronous_errors) {
  const Stream stream;
  const CUdeviceptr p = allocate(KiB);
  hold(stream, 20ms);
  fill(stream, 0x10, KiB, 1);  // no such memory
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemFree(p));
  std::_Exit(expectations_failed() ? 1 : 0);
}

TEST_F(Order, FreeReturnsAsynchronousErrors) {
  SKIP_IF_DEFERRED();
  EXPECT_SCENARIO("free_returns_asynchronous_errors");
}

// --- The table: freed by …, handed out by … ----------------------------------------------------------------

enum class Api { sync, async };
constexpr std::array sizes{4 * KiB, 1 * MiB, 48 * MiB};

// What kernels touch of a block: enough to notice another one at the same place.
std::size_t touched(std::size_t size) { return std::min(size, MiB); }

CUdeviceptr allocate(Api api, std::size_t size, CUstream stream) {
  return api == Api::sync ? contract::allocate(size) : allocate_async(size, stream);
}
void free(Api api, CUdeviceptr p, CUstream stream) {
  CHECK_CU(CUDA_SUCCESS, api == Api::sync ? driver().MemFree(p) : driver().MemFreeAsync(p, stream));
}

// `stream` writes and holds a block that is freed under it; then several blocks of that size are allocated
// and filled on `other`, which nothing orders after `stream`.
void block_is_not_handed_out_while_held(Api allocated, Api freed, Api next, CUstream stream, CUstream other,
                                        std::size_t size) {
  SharedWord bad;
  const CUdeviceptr p = allocate(allocated, size, stream);
  fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
  free(freed, p, stream);
  std::array<CUdeviceptr, 4> blocks{};
  for (CUdeviceptr& q : blocks) {
    q = allocate(next, size, other);
    fill(other, q, touched(size), 0x88);
  }
  finish(other);
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U) << "freed " << (freed == Api::sync ? "sync" : "async") << ", handed out "
                           << (next == Api::sync ? "sync" : "async") << ", " << size << " bytes";
  for (const CUdeviceptr q : blocks) free(next, q, other);
}

TEST_F(Order, ABlockIsNotHandedOutWhileAnotherStreamUsesIt) {
  const Stream stream, other;
  for (const std::size_t size : sizes) {
    for (const Api allocated : {Api::sync, Api::async}) {
      for (const Api freed : {Api::sync, Api::async}) {
        if (allocated == Api::async && freed == Api::sync) continue;  // does not wait: see the next test
        for (const Api next : {Api::sync, Api::async}) {
          block_is_not_handed_out_while_held(allocated, freed, next, stream, other, size);
        }
      }
    }
  }
}

// cuMemFree of a cuMemAllocAsync pointer does not wait for the host, so the block must.
TEST_F(Order, AnAsyncBlockFreedSynchronouslyIsNotHandedOutWhileUsed) {
  if (!pooled()) GTEST_SKIP() << "the driver promises nothing for its own block freed under running work";
  const Stream stream, other;
  for (const std::size_t size : sizes) {
    for (const Api next : {Api::sync, Api::async}) {
      block_is_not_handed_out_while_held(Api::async, Api::sync, next, stream, other, size);
    }
  }
}

TEST_F(Order, ABlockIsNotHandedOutWhileALegacyOrBlockingStreamUsesIt) {
  const Stream other, blocking(CU_STREAM_DEFAULT);
  for (const CUstream stream : {legacy, CU_STREAM_LEGACY, CUstream{blocking}}) {
    for (const Api freed : {Api::sync, Api::async}) {
      for (const Api next : {Api::sync, Api::async}) {
        block_is_not_handed_out_while_held(freed, freed, next, stream, other, MiB);
      }
    }
  }
}

// The other stream's kernel may be the slow one: the block goes back to the stream that freed it, at once and
// in its order.
TEST_F(Order, TheSameStreamGetsItsBlockBackInOrder) {
  SharedWord bad, flag;
  const Stream stream;
  std::set<CUdeviceptr> seen;
  wait_flag(stream, flag);
  for (std::uint8_t round = 1; round <= 16; ++round) {
    const CUdeviceptr p = allocate_async(48 * MiB, stream);
    seen.insert(p);
    fill(stream, p, touched(48 * MiB), round);
    check(stream, p, touched(48 * MiB), round, bad);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  }
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  EXPECT_EQ(seen.size(), 1U) << "a block freed on a stream is that stream's next one";
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
}

// Another stream gets a block of a busy stream as soon as it is ordered after the free by an event.
TEST_F(Order, AnOrderedStreamGetsTheBlock) {
  const std::size_t size = 48 * MiB;
  SharedWord bad, flag;
  const Stream first, second;
  std::set<CUdeviceptr> seen;
  wait_flag(first, flag);
  for (std::uint8_t round = 1; round <= 8; ++round) {
    for (const bool forth : {true, false}) {
      const CUstream mine = forth ? first : second, theirs = forth ? second : first;
      const CUdeviceptr p = allocate_async(size, mine);
      seen.insert(p);
      fill(mine, p, touched(size), round);
      check(mine, p, touched(size), round, bad);
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, mine));
      order(mine, theirs);
    }
  }
  EXPECT_TRUE(busy(first));
  flag.Set(1);
  EXPECT_LE(seen.size(), 4U) << "sixteen blocks, each ordered after the one before";
  finish(first);
  finish(second);
  EXPECT_EQ(bad.Get(), 0U);
}

// An event recorded before the free orders nothing after it.
TEST_F(Order, AnEventBeforeTheFreeOrdersNothing) {
  for (const std::size_t size : sizes) {
    SharedWord bad;
    const Stream stream, other;
    const CUdeviceptr p = allocate_async(size, stream);
    order(stream, other);
    fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    const CUdeviceptr q = allocate_async(size, other);
    fill(other, q, touched(size), 0x88);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, other));
    finish(other);
    finish(stream);
    EXPECT_EQ(bad.Get(), 0U) << size;
  }
}

// An event that is recorded again stands for its last record only, and a wait for the state at the call.
TEST_F(Order, AnEventWaitTakesTheLastRecord) {
  const std::size_t size = MiB;
  SharedWord bad;
  const Stream stream, idle, other;
  const Event event;
  const CUdeviceptr p = allocate_async(size, stream);
  fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(event, stream));
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(event, idle));
  CHECK_CU(CUDA_SUCCESS, driver().StreamWaitEvent(other, event, 0));
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(event, stream));
  const CUdeviceptr q = allocate_async(size, other);
  fill(other, q, touched(size), 0x88);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, other));
  finish(other);
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
}

// A synchronised context is clean, up to the moment of the call.
TEST_F(Order, AfterSynchronizingTheContextMemoryIsReused) {
  const Stream stream;
  std::set<CUdeviceptr> seen;
  for (int round = 0; round < 16; ++round) {
    const CUdeviceptr p = allocate_async(48 * MiB, stream);
    seen.insert(p);
    hold(stream, 1ms);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  }
  EXPECT_LE(seen.size(), 4U);
}

// --- Streams and threads that come and go --------------------------------------------------------------------

TEST_F(Order, ADestroyedBusyStreamKeepsItsBlocks) {
  for (const std::size_t size : sizes) {
    for (const Api next : {Api::sync, Api::async}) {
      SharedWord bad;
      const Stream other;
      Stream stream;
      const CUdeviceptr p = allocate_async(size, stream);
      fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
      stream.Destroy();
      const CUdeviceptr q = allocate(next, size, other);
      fill(other, q, touched(size), 0x88);
      finish(other);
      free(next, q, other);
      CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
      EXPECT_EQ(bad.Get(), 0U) << size;
    }
  }
}

// A new stream may get the handle of a destroyed one: it is another stream all the same.
TEST_F(Order, AReusedStreamHandleIsAnotherStream) {
  const std::size_t size = MiB;
  SharedWord bad;
  Stream stream;
  const CUdeviceptr p = allocate_async(size, stream);
  fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  stream.Destroy();
  std::vector<CUstream> streams(64);
  for (CUstream& s : streams) {
    CHECK_CU(CUDA_SUCCESS, driver().StreamCreate(&s, CU_STREAM_NON_BLOCKING));
    const CUdeviceptr q = allocate_async(size, s);
    fill(s, q, size, 0x88);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, s));
  }
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  EXPECT_EQ(bad.Get(), 0U);
  for (const CUstream s : streams) CHECK_CU(CUDA_SUCCESS, driver().StreamDestroy(s));
}

// Each thread's per-thread stream is its own, though the handle is the same: 2, or 0 in the _ptsz variants.
TEST_F(Order, PerThreadStreamsAreDifferentStreams) {
  const std::size_t size = MiB;
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  for (const bool variant : {false, true}) {
    const auto next_block = [&] {
      CUdeviceptr p = 0;
      CHECK_CU(CUDA_SUCCESS, variant ? driver().MemAllocAsync_ptsz(&p, size, nullptr)
                                     : driver().MemAllocAsync(&p, size, CU_STREAM_PER_THREAD));
      return p;
    };
    const auto give_back = [&](CUdeviceptr p) {
      CHECK_CU(CUDA_SUCCESS,
               variant ? driver().MemFreeAsync_ptsz(p, nullptr) : driver().MemFreeAsync(p, CU_STREAM_PER_THREAD));
    };
    SharedWord bad;
    const CUdeviceptr p = next_block();
    fill_hold_check(CU_STREAM_PER_THREAD, p, size, 0x77, 20ms, bad);
    give_back(p);
    std::thread([&] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      const CUdeviceptr q = next_block();
      fill(CU_STREAM_PER_THREAD, q, size, 0x88);
      give_back(q);
      finish(CU_STREAM_PER_THREAD);
    }).join();
    finish(CU_STREAM_PER_THREAD);
    EXPECT_EQ(bad.Get(), 0U) << (variant ? "_ptsz" : "handle 2");
  }
}

TEST_F(Order, ABlockMayBeFreedByAnotherThread) {
  const std::size_t size = MiB;
  SharedWord bad;
  const Stream stream, other;
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  const auto in_a_thread = [&](const std::function<void()>& body) {
    std::thread([&] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      body();
    }).join();
  };
  CUdeviceptr p = 0, q = 0;
  in_a_thread([&] { p = contract::allocate(size); });
  fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
  in_a_thread([&] {
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    if (!deferred()) {
      EXPECT_FALSE(busy(stream));
    }
  });
  in_a_thread([&] {
    q = contract::allocate(size);
    fill(other, q, touched(size), 0x88);
    finish(other);
  });
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(q));
}

// Threads that allocate, hold, and free with both interfaces, each on a stream of its own, streams that are
// destroyed busy among them.
TEST_F(Order, ManyThreadsNeverShareABlock) {
  SharedWord bad;
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      unsigned random = id * 7919 + 1;
      const auto next = [&random](unsigned below) {
        random = random * 1664525 + 1013904223;
        return (random >> 8) % below;
      };
      CUstream stream = nullptr;
      CHECK_CU(CUDA_SUCCESS, driver().StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
      for (int round = 0; round < 60; ++round) {
        const Api api = next(2) != 0 ? Api::sync : Api::async;
        const std::size_t size = std::array{KiB, 4 * KiB, 64 * KiB}[next(3)];
        const CUdeviceptr p = allocate(api, size, stream);
        fill_hold_check(stream, p, touched(size), static_cast<std::uint8_t>(16 * id + next(16)), 1ms, bad);
        if (api == Api::async && next(4) == 0) finish(stream);
        free(next(8) == 0 ? Api::async : api, p, stream);
        if (next(16) == 0) {
          CHECK_CU(CUDA_SUCCESS, driver().StreamDestroy(stream));
          CHECK_CU(CUDA_SUCCESS, driver().StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        }
      }
      finish(stream);
      CHECK_CU(CUDA_SUCCESS, driver().StreamDestroy(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  EXPECT_EQ(bad.Get(), 0U);
}

// --- What must never deadlock, and what must not be serialised -----------------------------------------------

// Free; launch a kernel that spins on a host flag; allocate; set the flag. A fence taken after the free covers
// the spinning kernel, so neither the host nor a stream may be made to wait for it.
TEST_F(Order, ASpinningKernelDoesNotDeadlockAllocation) {
  for (const std::size_t size : {64 * KiB, 48 * MiB}) {
    for (const Api allocated : {Api::sync, Api::async}) {
      for (const Api freed : {Api::sync, Api::async}) {
        // Natively cuMemFree of a cuMemAllocAsync block takes it from under the kernel that fills it, and when the
        // driver takes back a cuMemAlloc block freed on a stream is its own matter.
        if (allocated != freed && !(allocated == Api::async ? pooled() : under_cushion())) continue;
        for (const Api next : {Api::sync, Api::async}) {
          SharedWord flag;
          const Stream stream, other;
          const CUdeviceptr p = allocate(allocated, size, stream);
          fill(stream, p, touched(size), 1);
          free(freed, p, stream);
          wait_flag(stream, flag);
          const CUdeviceptr same = allocate(next, size, stream), elsewhere = allocate(next, size, other);
          fill(other, elsewhere, touched(size), 2);
          finish(other);
          EXPECT_TRUE(busy(stream));
          flag.Set(1);
          finish(stream);
          free(next, same, stream);
          free(next, elsewhere, other);
        }
      }
    }
  }
}

// A stream that allocates and frees is not held up by another one, not even if both block on the legacy stream.
TEST_F(Order, IndependentStreamsAreNotSerialised) {
  for (const unsigned flags : {CU_STREAM_NON_BLOCKING, CU_STREAM_DEFAULT}) {
    SharedWord flag;
    const Stream slow(flags), fast(flags);
    const CUdeviceptr shared = allocate_async(MiB, slow);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(shared, slow));
    wait_flag(slow, flag);
    for (int round = 0; round < 20; ++round) {
      const CUdeviceptr p = allocate_async(MiB, fast);
      fill(fast, p, MiB, 1);
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, fast));
      if (!under_cushion()) continue;  // when the driver takes back a cuMemAlloc block is its own matter
      const CUdeviceptr q = contract::allocate(MiB);
      fill(fast, q, MiB, 1);
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, fast));
    }
    finish(fast);
    EXPECT_TRUE(busy(slow));
    flag.Set(1);
    finish(slow);
  }
}

// --- A driver that refuses to say whether work is over ---------------------------------------------------------

// No failing fence makes memory clean: a free answers the error and the block stays live, or it is not handed out.
SCENARIO(fences_fail) {
  const std::size_t size = MiB;
  SharedWord bad;
  const Stream stream, other;
  for (const Api freed : {Api::sync, Api::async}) {
    const CUdeviceptr p = allocate(freed, size, stream);
    fill_hold_check(stream, p, touched(size), 0x77, 20ms, bad);
    const CUresult result = freed == Api::sync ? driver().MemFree(p) : driver().MemFreeAsync(p, stream);
    for (const Api next : {Api::sync, Api::async}) {
      CUdeviceptr q = 0;
      if ((next == Api::sync ? driver().MemAlloc(&q, size) : driver().MemAllocAsync(&q, size, other)) == CUDA_SUCCESS) {
        fill(other, q, touched(size), 0x88);
      }
    }
    finish(other);
    finish(stream);
    if (result != CUDA_SUCCESS) {
      CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    }
  }
  EXPECT_EQ(bad.Get(), 0U);
}

TEST_F(Order, AFailingFenceMakesNothingClean) {
  if (!Driver::Emulated()) GTEST_SKIP() << "only the emulated driver fails on demand";
  for (const char* function : {"cuCtxRecordEvent", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
                               "cuEventCreate", "cuStreamWaitEvent", "cuStreamQuery", "cuMemFree_v2"}) {
    for (const char* nth : {":1:999", ":2:999", ":3:999"}) {
      SCOPED_TRACE(std::string(function) + nth);
      EXPECT_SCENARIO("fences_fail", {std::string("EMU_FAIL=") + function + nth});
    }
  }
}

// --- The program's own pool ----------------------------------------------------------------------------------

SCENARIO(pool_made_current) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  CUmemoryPool pool = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().MemPoolCreate(&pool, &properties));
  const Stream stream;
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(allocate_async(MiB, stream), stream));
  CHECK_CU(CUDA_SUCCESS, driver().DeviceSetMemPool(0, pool));
  const CUdeviceptr p = allocate_async(MiB, stream);
  cuuint64_t used = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_GE(used, MiB);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  finish(stream);
  CHECK_CU(CUDA_SUCCESS, driver().MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_EQ(used, 0U);
}

TEST_F(Order, AllocateAsyncUsesThePoolMadeCurrent) { EXPECT_SCENARIO("pool_made_current"); }

}  // namespace
