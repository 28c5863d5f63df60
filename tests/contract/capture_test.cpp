// Contract §4, stream capture: what allocating, freeing and asking do while a capture is open.
//
// Natively some calls answer 900 and invalidate the capture. Under Cushion such a call may answer 0 instead;
// then the capture survives. Wherever the native call is harmless, it is under Cushion, too.
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "tests/contract/contract.h"

namespace {

using namespace contract;

class Capture : public Contract {};

constexpr std::array modes{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                           CU_STREAM_CAPTURE_MODE_RELAXED};

void begin(CUstream stream, CUstreamCaptureMode mode) {
  CHECK_CU(CUDA_SUCCESS, driver().StreamBeginCapture(stream, mode));
}

// Ends the capture: what cuStreamEndCapture answered.
CUresult end(CUstream stream) {
  CUgraph graph = nullptr;
  const CUresult result = driver().StreamEndCapture(stream, &graph);
  if (graph != nullptr) {
    CHECK_CU(CUDA_SUCCESS, driver().GraphDestroy(graph));
  }
  return result;
}

CUgraphExec end_and_instantiate(CUstream stream) {
  CUgraph graph = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().StreamEndCapture(stream, &graph));
  CUgraphExec exec = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().GraphInstantiateWithFlags(&exec, graph, 0));
  CHECK_CU(CUDA_SUCCESS, driver().GraphDestroy(graph));
  return exec;
}

// Runs `body` in this thread, or in another one whose current context is the same.
void run(bool in_another_thread, const std::function<void()>& body) {
  if (!in_another_thread) return body();
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::thread([&] {
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
    body();
  }).join();
}

// The calls under test. Each gets a block allocated before the capture, on a stream that does not capture, and
// frees what it allocates: only the first result counts.
struct Call {
  const char* name;
  CUresult (*make)(CUdeviceptr block, CUstream stream);
};

CUresult allocate_of(std::size_t size) {
  CUdeviceptr p = 0;
  const CUresult result = driver().MemAlloc(&p, size);
  if (result == CUDA_SUCCESS) {
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  }
  return result;
}

const std::array unsafe_calls{
    Call{"cuMemAlloc small", [](CUdeviceptr, CUstream) { return allocate_of(KiB); }},
    Call{"cuMemAlloc large", [](CUdeviceptr, CUstream) { return allocate_of(48 * MiB); }},
    Call{"cuMemFree", [](CUdeviceptr block, CUstream) { return driver().MemFree(block); }},
};
const std::array async_calls{
    Call{"cuMemAllocAsync",
         [](CUdeviceptr, CUstream stream) {
           CUdeviceptr p = 0;
           const CUresult result = driver().MemAllocAsync(&p, KiB, stream);
           if (result == CUDA_SUCCESS) {
             CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
           }
           return result;
         }},
};
const std::array harmless_calls{
    Call{"cuMemGetInfo",
         [](CUdeviceptr, CUstream) {
           std::size_t free = 0, total = 0;
           return driver().MemGetInfo(&free, &total);
         }},
};

// Makes the call while `stream` captures; `harmless` says what native CUDA does.
void call_beside_capture(const Call& call, unsigned flags, CUstreamCaptureMode mode, bool other_thread, bool harmless) {
  SCOPED_TRACE(testing::Message() << call.name << ", mode " << mode << (other_thread ? ", another thread" : "")
                                  << (flags == CU_STREAM_DEFAULT ? ", blocking stream" : ""));
  const Stream capturing(flags), stream;
  const CUdeviceptr block = allocate(KiB), used = allocate(KiB);
  begin(capturing, mode);
  fill(capturing, used, KiB, 1);
  CUresult result = CUDA_ERROR_UNKNOWN;
  run(other_thread, [&] { result = call.make(block, stream); });
  const bool freed = call.make == unsafe_calls.back().make && result == CUDA_SUCCESS;
  if (harmless || (under_cushion() && result == CUDA_SUCCESS)) {
    EXPECT_EQ(result, CUDA_SUCCESS);
    CHECK_CU(CUDA_SUCCESS, end(capturing));
  } else {
    EXPECT_EQ(result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, end(capturing));
  }
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(used));
  if (!freed) {
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(block));
  }
}

template <std::size_t n>
void calls_beside_captures(const std::array<Call, n>& calls, bool always_harmless = false) {
  for (const Call& call : calls) {
    for (const unsigned flags : {CU_STREAM_NON_BLOCKING, CU_STREAM_DEFAULT}) {
      for (const CUstreamCaptureMode mode : modes) {
        for (const bool other_thread : {false, true}) {
          const bool harmless = always_harmless || mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
                                (other_thread && mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
          call_beside_capture(call, flags, mode, other_thread, harmless);
        }
      }
    }
  }
}

TEST_F(Capture, AllocateAndFreeBesideACapture) { calls_beside_captures(unsafe_calls); }
TEST_F(Capture, AllocateAsyncOnAnotherStreamBesideACapture) { calls_beside_captures(async_calls); }
TEST_F(Capture, MemGetInfoBesideACapture) { calls_beside_captures(harmless_calls, true); }

// With the calling thread's mode exchanged to relaxed, everything is harmless.
TEST_F(Capture, ARelaxedThreadIsHarmless) {
  for (const CUstreamCaptureMode mode : modes) {
    const Stream capturing, stream;
    const CUdeviceptr block = allocate(KiB), used = allocate(KiB);
    begin(capturing, mode);
    fill(capturing, used, KiB, 1);
    CUstreamCaptureMode exchanged = CU_STREAM_CAPTURE_MODE_RELAXED;
    CHECK_CU(CUDA_SUCCESS, driver().ThreadExchangeStreamCaptureMode(&exchanged));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(48 * MiB)));
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(allocate_async(MiB, stream), stream));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(block));
    CHECK_CU(CUDA_SUCCESS, driver().ThreadExchangeStreamCaptureMode(&exchanged));
    EXPECT_EQ(exchanged, CU_STREAM_CAPTURE_MODE_RELAXED) << "the thread's own mode is not disturbed";
    CHECK_CU(CUDA_SUCCESS, end(capturing));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(used));
  }
}

// cuMemFree beside a capture waits for the other streams all the same.
TEST_F(Capture, FreeBesideACaptureWaits) {
  if (deferred()) GTEST_SKIP() << "CUSHION_FREE=deferred gives up the wait of cuMemFree";
  for (const bool other_thread : {false, true}) {
    SharedWord done;
    const Stream capturing, stream;
    const CUdeviceptr block = allocate(KiB);
    begin(capturing, other_thread ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL : CU_STREAM_CAPTURE_MODE_RELAXED);
    fill(stream, done.on_device(), 4, 1, 20ms);
    run(other_thread, [&] { CHECK_CU(CUDA_SUCCESS, driver().MemFree(block)); });
    EXPECT_EQ(done.Get(), 0x01010101U);
    CHECK_CU(CUDA_SUCCESS, end(capturing));
  }
}

// A block in use by another stream is not handed out beside a capture either.
TEST_F(Capture, ABusyBlockIsNotHandedOutBesideACapture) {
  for (const bool freed_before : {true, false}) {
    const std::size_t size = MiB;
    SharedWord bad;
    const Stream capturing, stream, other;
    const CUdeviceptr p = allocate_async(size, stream);
    if (!freed_before) begin(capturing, CU_STREAM_CAPTURE_MODE_RELAXED);
    fill_hold_check(stream, p, size, 0x77, 20ms, bad);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    if (freed_before) begin(capturing, CU_STREAM_CAPTURE_MODE_RELAXED);
    const CUdeviceptr sync = allocate(size), async = allocate_async(size, other);
    fill(other, sync, size, 0x88);
    fill(other, async, size, 0x88);
    finish(other);
    CHECK_CU(CUDA_SUCCESS, end(capturing));
    finish(stream);
    EXPECT_EQ(bad.Get(), 0U);
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(sync));
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(async, other));
  }
}

// On a capturing stream cuMemAllocAsync is a graph node: each launch allocates, uses and frees.
TEST_F(Capture, AllocateAsyncOnACapturingStreamIsAGraphNode) {
  for (const CUstreamCaptureMode mode : modes) {
    SharedWord bad;
    const Stream stream;
    const std::size_t live = free_memory();
    begin(stream, mode);
    const CUdeviceptr p = allocate_async(MiB, stream);
    fill_hold_check(stream, p, MiB, 0x55, 1ms, bad);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    const CUgraphExec exec = end_and_instantiate(stream);
    for (int launch = 0; launch < 3; ++launch) CHECK_CU(CUDA_SUCCESS, driver().GraphLaunch(exec, stream));
    finish(stream);
    EXPECT_EQ(bad.Get(), 0U);
    CHECK_CU(CUDA_SUCCESS, driver().GraphExecDestroy(exec));
    EXPECT_GE(free_memory() + 256 * MiB, live);
  }
}

// A stream that joined the capture through an event captures as well.
TEST_F(Capture, AllocateAsyncOnAJoinedStreamIsAGraphNode) {
  SharedWord bad;
  const Stream stream, joined;
  begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  order(stream, joined);
  const CUdeviceptr p = allocate_async(MiB, joined);
  fill_hold_check(joined, p, MiB, 0x55, 1ms, bad);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, joined));
  order(joined, stream);
  const CUgraphExec exec = end_and_instantiate(stream);
  CHECK_CU(CUDA_SUCCESS, driver().GraphLaunch(exec, stream));
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
  CHECK_CU(CUDA_SUCCESS, driver().GraphExecDestroy(exec));
}

// A graph's pointer that the graph does not free is freed by the program, with either call.
TEST_F(Capture, AGraphOwnedPointerIsFreedOutside) {
  for (const bool async : {true, false}) {
    const Stream stream;
    begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    const CUdeviceptr p = allocate_async(MiB, stream);
    fill(stream, p, MiB, 0x55);
    const CUgraphExec exec = end_and_instantiate(stream);
    CHECK_CU(CUDA_SUCCESS, driver().GraphLaunch(exec, stream));
    finish(stream);
    CHECK_CU(CUDA_SUCCESS, async ? driver().MemFreeAsync(p, stream) : driver().MemFree(p));
    finish(stream);
    CHECK_CU(CUDA_SUCCESS, driver().GraphExecDestroy(exec));
  }
}

TEST_F(Capture, FreeAsyncOfAnOutsidePointerOnACapturingStreamIsInvalid) {
  const Stream stream, other;
  for (const bool async : {false, true}) {
    const CUdeviceptr p = async ? allocate_async(MiB, other) : allocate(MiB);
    const CUdeviceptr used = allocate(KiB);
    finish(other);
    begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(p, stream));
    fill(stream, used, KiB, 1);
    CHECK_CU(CUDA_SUCCESS, end(stream));
    fill(other, p, MiB, 1);  // still live
    finish(other);
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(used));
  }
}

void expect_free_waits() {
  const SharedWord done;
  const Stream stream;
  const CUdeviceptr p = allocate(KiB);
  fill(stream, done.on_device(), 4, 1, 20ms);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  if (!deferred()) {
    EXPECT_EQ(done.Get(), 0x01010101U);
  }
  finish(stream);
}

// Every form of capture counts, and every way it may end: afterwards a free waits as ever.
TEST_F(Capture, FreeWaitsAfterACapture) {
  const Stream stream;
  begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK_CU(CUDA_SUCCESS, end(stream));
  expect_free_waits();
}

TEST_F(Capture, FreeWaitsAfterAnInvalidatedCapture) {
  const Stream stream;
  begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, driver().CtxSynchronize());
  CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, end(stream));
  expect_free_waits();
}

TEST_F(Capture, FreeWaitsDuringAndAfterACaptureToAGraph) {
  const Stream stream;
  CUgraph graph = nullptr, same = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().GraphCreate(&graph, 0));
  if (driver().StreamBeginCaptureToGraph == nullptr) GTEST_SKIP() << "the driver is older than 12.3";
  CHECK_CU(CUDA_SUCCESS,
           driver().StreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
  expect_free_waits();
  CHECK_CU(CUDA_SUCCESS, driver().StreamEndCapture(stream, &same));
  CHECK_CU(CUDA_SUCCESS, driver().GraphDestroy(graph));
  expect_free_waits();
}

// In a process of its own: what the driver itself still refuses after this is not measured.
SCENARIO(destroys_a_capturing_stream) {
  Stream stream;
  begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  stream.Destroy();
  expect_free_waits();
}

TEST_F(Capture, FreeWaitsAfterACapturingStreamIsDestroyed) { EXPECT_SCENARIO("destroys_a_capturing_stream"); }

// A graph that uses an ordinary block keeps working while others allocate and free around it.
TEST_F(Capture, AGraphReplaysBesideAllocations) {
  SharedWord bad;
  const Stream stream, other;
  const CUdeviceptr p = allocate(MiB);
  begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  fill_hold_check(stream, p, MiB, 0x55, 1ms, bad);
  const CUgraphExec exec = end_and_instantiate(stream);
  for (int launch = 0; launch < 10; ++launch) {
    CHECK_CU(CUDA_SUCCESS, driver().GraphLaunch(exec, stream));
    const CUdeviceptr q = allocate_async(MiB, other), r = allocate(MiB);
    fill(other, q, MiB, 0x66);
    fill(other, r, MiB, 0x66);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, other));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(r));
  }
  finish(stream);
  finish(other);
  EXPECT_EQ(bad.Get(), 0U);
  CHECK_CU(CUDA_SUCCESS, driver().GraphExecDestroy(exec));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

// Captures begin and end all the time while other threads allocate and free: none of them ever fails.
void captures_beside_busy_threads(CUstreamCaptureMode mode) {
  const CUdeviceptr used = allocate(KiB);
  std::atomic<bool> stop{false};
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(std::make_unique<Stream>());
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, stream = CUstream{*streams[static_cast<std::size_t>(i)]}] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      while (!stop) {
        const CUdeviceptr p = allocate(64 * KiB), q = allocate_async(64 * KiB, stream);
        fill(stream, p, 64 * KiB, 1);
        CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, stream));
        CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
      }
    });
  }
  for (int i = 2; i < 4; ++i) {
    threads.emplace_back([&, stream = CUstream{*streams[static_cast<std::size_t>(i)]}] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      for (int round = 0; round < 100; ++round) {
        begin(stream, mode);
        fill(stream, used, KiB, 1);
        CHECK_CU(CUDA_SUCCESS, end(stream));
      }
    });
  }
  threads[2].join();
  threads[3].join();
  stop = true;
  threads[0].join();
  threads[1].join();
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(used));
}

TEST_F(Capture, CapturesBesideBusyThreadsNeverFail) {
  captures_beside_busy_threads(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  captures_beside_busy_threads(CU_STREAM_CAPTURE_MODE_RELAXED);
}

}  // namespace
