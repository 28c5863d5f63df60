// Capture gate: no cuCtxRecordEvent while a capture is open; captures that are over are forgotten.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/capture.h"

namespace cushion {
namespace {

// What the driver says of each stream. A stream that is not there does not exist: error 400.
std::mutex g_mutex;
std::map<CUstream, CUstreamCaptureStatus> g_streams;
std::vector<CUstream> g_asked;

CUresult CUDAAPI is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  std::lock_guard lock(g_mutex);
  g_asked.push_back(stream);
  const auto found = g_streams.find(stream);
  if (found == g_streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *status = found->second;
  return CUDA_SUCCESS;
}

class CaptureGateTest : public testing::Test {
 protected:
  static constexpr long kThread = 100;

  void SetUp() override {
    g_streams.clear();
    g_asked.clear();
    driver.cuStreamIsCapturing = is_capturing;
  }
  void begin(CUstream stream, long thread = kThread, bool success = true) {
    gate.begin();
    if (success) g_streams[stream] = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    gate.begun(stream, context, thread, success);
  }
  void refresh(long thread = kThread) { gate.refresh(driver, thread); }
  bool enters() {
    const bool open = gate.enter();
    if (open) gate.leave();
    return open;
  }

  Driver driver;
  CaptureGate gate;
  CUcontext context = reinterpret_cast<CUcontext>(0x10);
  const CUstream a = stream_handle(0x1000);
  const CUstream b = stream_handle(0x2000);
};

TEST_F(CaptureGateTest, IsOpenUntilACaptureBegins) {
  EXPECT_TRUE(enters());
  EXPECT_FALSE(gate.may_be_open());
  begin(a);
  EXPECT_FALSE(enters());
  EXPECT_TRUE(gate.may_be_open());
}

TEST_F(CaptureGateTest, RecordersShareIt) {
  EXPECT_TRUE(gate.enter());
  EXPECT_TRUE(gate.enter());
  gate.leave();
  gate.leave();
  begin(a);  // would wait for ever for a recorder who did not leave
  EXPECT_FALSE(enters());
}

TEST_F(CaptureGateTest, ABeginThatFailsOpensItAgain) {
  begin(a, kThread, false);
  EXPECT_TRUE(enters());
}

TEST_F(CaptureGateTest, ACaptureThatIsOverIsForgottenAndOthersStay) {
  begin(a);
  begin(b);
  g_streams[a] = CU_STREAM_CAPTURE_STATUS_NONE;
  refresh();
  EXPECT_FALSE(enters());
  g_streams[b] = CU_STREAM_CAPTURE_STATUS_NONE;
  refresh();
  EXPECT_TRUE(enters());
}

TEST_F(CaptureGateTest, AFailedEndLeavesItClosed) {
  begin(a);
  refresh();
  EXPECT_FALSE(enters());
}

TEST_F(CaptureGateTest, AnInvalidatedCaptureIsStillOpen) {
  begin(a);
  g_streams[a] = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  refresh();
  EXPECT_FALSE(enters());
  EXPECT_TRUE(gate.capturing(driver, a));
}

TEST_F(CaptureGateTest, AStreamThatTheDriverSaysNothingOfMayBeCapturing) {
  begin(a);
  bool capturing = true;
  EXPECT_EQ(gate.ask(driver, b, capturing), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_FALSE(capturing);
  EXPECT_TRUE(gate.capturing(driver, b));
  g_streams[b] = CU_STREAM_CAPTURE_STATUS_NONE;
  EXPECT_FALSE(gate.capturing(driver, b));
}

TEST_F(CaptureGateTest, AnErrorIsNoProofThatACaptureIsOver) {
  begin(a);
  g_streams.clear();
  refresh();
  EXPECT_FALSE(enters());
}

TEST_F(CaptureGateTest, ADestroyedStreamTakesItsCaptureWithIt) {
  begin(a);
  begin(b);
  gate.forget(a, kThread);
  EXPECT_FALSE(enters());
  gate.forget(b, kThread + 1);
  EXPECT_TRUE(enters());
}

TEST_F(CaptureGateTest, AContextTakesItsCapturesWithIt) {
  const CUcontext first = context;
  begin(a);
  begin(stream_handle(kPerThreadStream), kThread + 1);
  context = reinterpret_cast<CUcontext>(0x20);
  begin(b);
  gate.forget(context);
  EXPECT_FALSE(enters());
  gate.forget(first);
  EXPECT_TRUE(enters());
}

TEST_F(CaptureGateTest, ForgettingAStreamThatDoesNotCaptureChangesNothing) {
  begin(a);
  gate.forget(b, kThread);
  EXPECT_FALSE(enters());
}

TEST_F(CaptureGateTest, APerThreadStreamIsItsOwnersToAskAndForget) {
  const CUstream mine = stream_handle(kPerThreadStream);
  begin(mine, kThread);
  g_streams[mine] = CU_STREAM_CAPTURE_STATUS_NONE;  // as another thread's stream 2 would answer
  refresh(kThread + 1);
  EXPECT_TRUE(g_asked.empty());
  gate.forget(mine, kThread + 1);
  EXPECT_FALSE(enters());
  refresh(kThread);
  EXPECT_TRUE(enters());
}

TEST_F(CaptureGateTest, TheLegacyStreamIsNeverAsked) {
  begin(a);
  EXPECT_FALSE(gate.capturing(driver, nullptr));
  EXPECT_FALSE(gate.capturing(driver, stream_handle(kLegacyStream)));
  EXPECT_TRUE(g_asked.empty());
  EXPECT_TRUE(gate.capturing(driver, a));
}

TEST_F(CaptureGateTest, NoCallIsMadeWhileNoCaptureIsOpen) {
  g_streams[a] = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  EXPECT_FALSE(gate.capturing(driver, a));
  refresh();
  EXPECT_TRUE(g_asked.empty());
}

TEST_F(CaptureGateTest, ABeginnerWaitsForTheRecordUnderWay) {
  ASSERT_TRUE(gate.enter());
  std::atomic<bool> begun{false};
  std::thread beginner([&] {
    gate.begin();
    begun = true;
  });
  while (!gate.may_be_open()) std::this_thread::yield();
  EXPECT_FALSE(gate.enter());  // nor does a recorder wait for the beginner
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE(begun);
  gate.leave();
  beginner.join();
  EXPECT_TRUE(begun);
}

// Recorders and captures from many threads: the two never meet, and in the end the gate is open.
TEST_F(CaptureGateTest, NoRecorderIsInsideWhileACaptureIsOpen) {
  constexpr int kRounds = 2'000;
  std::atomic<int> captures{0};
  std::atomic<int> inside{0};
  std::atomic<int> met{0};
  std::atomic<int> beginners{2};
  std::atomic<std::uint64_t> recorded{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, stream = i == 0 ? a : b] {
      for (int round = 0; round < kRounds; ++round) {
        const bool success = round % 3 != 0;
        gate.begin();
        captures.fetch_add(1);
        if (inside.load() != 0) met.fetch_add(1);
        {
          std::lock_guard lock(g_mutex);
          g_streams[stream] = success ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
        }
        if (!success) captures.fetch_sub(1);
        gate.begun(stream, context, kThread, success);
        if (!success) continue;
        if (round % 7 == 0) std::this_thread::yield();
        if (inside.load() != 0) met.fetch_add(1);
        captures.fetch_sub(1);
        if (round % 2 == 0) {
          {
            std::lock_guard lock(g_mutex);
            g_streams[stream] = CU_STREAM_CAPTURE_STATUS_NONE;
          }
          gate.refresh(driver, kThread);
        } else {
          gate.forget(stream, kThread);
        }
      }
      beginners.fetch_sub(1);
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (beginners.load() != 0) {
        if (!gate.enter()) {
          std::this_thread::yield();
          continue;
        }
        inside.fetch_add(1);
        if (captures.load() != 0) met.fetch_add(1);
        inside.fetch_sub(1);
        gate.leave();
        recorded.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(met, 0);
  EXPECT_TRUE(enters());
  EXPECT_FALSE(gate.may_be_open());
}

}  // namespace
}  // namespace cushion
