// Guards: overwritten ones are found, whichever way the block is freed; and never one that was not (core/guard.h).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/guard.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

class GuardTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (!IsSkipped()) core().options().guard.bytes = 100;
  }
  void Write(CUdeviceptr at, std::uint64_t bytes, CUstream stream) {
    CHECK_CU(0, driver().MemsetD8Async(at, 7, bytes, stream));
  }
  std::uint64_t overwritten() { return counters().guards_overwritten; }
  std::uint64_t skipped() { return counters().guards_skipped; }
  void Poll() { core().context().guard().poll(); }
};

TEST_F(GuardTest, RequestsAndAlignmentStayTheProgramsOwn) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{412}, std::uint64_t{413}, kMiB, kMiB + 1}) {
    const CUdeviceptr p = core().Malloc(bytes);
    EXPECT_EQ(core().usage().requested.current(), bytes);
    EXPECT_GE(core().usage().handed_out.current(), bytes + 100);
    EXPECT_EQ(p % (bytes > kMiB ? 64 << 10 : 512), 0u) << bytes;
    CHECK_CU(0, core().Free(p));
  }
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(GuardTest, AnOverwrittenOneIsFoundByACudaFree) {
  TestStream stream;
  const CUdeviceptr p = core().Malloc(1000);
  Write(p + 990, 13, stream);  // the free waits for it
  testing::internal::CaptureStderr();
  CHECK_CU(0, core().Free(p));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("behind a block of 1000 bytes at 0x"), std::string::npos) << text;
  EXPECT_NE(text.find(": 3 of 100 guard bytes, the first 0 bytes behind its end"), std::string::npos) << text;
  EXPECT_EQ(overwritten(), 1u);
  const CUdeviceptr again = core().Malloc(1000);
  EXPECT_EQ(again, p);
  CHECK_CU(0, core().Free(again));
  EXPECT_EQ(overwritten(), 1u);  // once per block
}

TEST_F(GuardTest, TheLastByteCountsAndTheOneBehindDoesNot) {
  const CUdeviceptr p = core().Malloc(412);
  const CUdeviceptr q = core().Malloc(300);
  Write(p + 511, 1, nullptr);
  Write(q + 400, 112, nullptr);
  CHECK_CU(0, core().Free(q));
  EXPECT_EQ(overwritten(), 0u);
  testing::internal::CaptureStderr();
  CHECK_CU(0, core().Free(p));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find(": 1 of 100 guard bytes, the first 99 bytes behind its end"), std::string::npos) << text;
}

TEST_F(GuardTest, AStreamOrderedFreeLooksInItsOrderAndDoesNotWait) {
  TestStream stream;
  const CUdeviceptr p = core().MallocAsync(1000, stream);
  Gate gate;
  gate.Hold(stream);
  Write(p + 1004, 2, stream);
  CHECK_CU(0, core().FreeAsync(p, stream));
  const CUdeviceptr again = core().MallocAsync(1000, stream);
  EXPECT_EQ(again, p);  // the reuse is as good as without
  CHECK_CU(0, core().FreeAsync(again, stream));
  Poll();
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_TRUE(stream.Busy());
  gate.Open();
  stream.Finish();
  testing::internal::CaptureStderr();
  Poll();
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find(": 2 of 100 guard bytes, the first 4 bytes behind its end"), std::string::npos) << text;
  EXPECT_EQ(overwritten(), 1u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(GuardTest, WhatCameIsFoundAtTheEndWithoutTheDriver) {
  TestStream stream;
  const CUdeviceptr p = core().MallocAsync(1000, stream);
  Write(p + 1000, 1, stream);
  CHECK_CU(0, core().FreeAsync(p, stream));
  stream.Finish();
  const std::uint64_t calls = core().shared.driver.calls;
  testing::internal::CaptureStderr();
  core().context().guard().finish(Patience::some);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(overwritten(), 1u);
  EXPECT_EQ(core().shared.driver.calls, calls);
}

// A stream that is not ordered behind the allocation's would see a guard that is not filled yet.
TEST_F(GuardTest, AFreeOnAnotherStreamComesAfterTheFill) {
  TestStream first;
  TestStream second;
  Gate gate;
  gate.Hold(first);
  const CUdeviceptr p = core().MallocAsync(1000, first);
  CHECK_CU(0, core().FreeAsync(p, second));
  gate.Open();
  first.Finish();
  second.Finish();
  Poll();
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(GuardTest, ACudaFreeWithoutAWaitLooksBehindAllWork) {
  core().options().free = FreeMode::deferred;
  TestStream stream;
  const CUdeviceptr p = core().Malloc(1000);
  const CUdeviceptr q = core().MallocAsync(2000, stream);
  Gate gate;
  gate.Hold(stream);
  Write(p + 1000, 100, stream);
  Write(q + 2099, 1, stream);
  CHECK_CU(0, core().Free(p));
  CHECK_CU(0, core().Free(q));
  const CUdeviceptr other = core().Malloc(1000);  // its fill is behind nothing
  EXPECT_NE(other, p);
  EXPECT_TRUE(stream.Busy());
  Poll();
  EXPECT_EQ(overwritten(), 0u);
  gate.Open();
  Synchronize();
  testing::internal::CaptureStderr();
  Poll();
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(overwritten(), 2u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(GuardTest, UnderPressureAStealerComesAfterTheLook) {
  TestStream first;
  TestStream second;
  const CUdeviceptr p = core().MallocAsync(kSegment - 1000, first);
  ASSERT_NE(p, 0u);
  core().refuse_growth();
  EXPECT_EQ(core().MallocAsync(kSegment - 1000, second), 0u);  // now memory is short
  Gate gate;
  gate.Hold(first);
  CHECK_CU(0, core().FreeAsync(p, first));
  const CUdeviceptr q = core().MallocAsync(kSegment - 900, second);
  EXPECT_EQ(q, p);
  gate.Open();
  CHECK_CU(0, core().FreeAsync(q, second));
  second.Finish();
  Poll();
  EXPECT_EQ(overwritten(), 0u);
}

TEST_F(GuardTest, NothingIsLookedAtBesideACapture) {
  TestStream stream;
  const CUdeviceptr p = core().MallocAsync(1000, stream);
  Write(p + 1000, 1, stream);
  stream.Finish();
  core().shared.gate.begin();
  const CUdeviceptr unguarded = core().MallocAsync(1000, stream);
  CHECK_CU(0, core().FreeAsync(p, stream));
  core().shared.gate.begun(nullptr, nullptr, 0, false);
  EXPECT_EQ(skipped(), 1u);
  CHECK_CU(0, core().FreeAsync(unguarded, stream));
  stream.Finish();
  Poll();
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 1u);
}

TEST_F(GuardTest, AfterAResetAllBeginsAnew) {
  TestStream stream;
  core().MallocAsync(1000, stream);
  const CUdeviceptr p = core().MallocAsync(1000, stream);
  CHECK_CU(0, core().FreeAsync(p, stream));
  stream.Finish();
  core().context().discard();
  core().context().revive();
  const CUdeviceptr q = core().Malloc(1000);
  CHECK_CU(0, core().Free(q));
  Poll();
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

// More frees under way than there is pinned memory for: looks are left out and counted, never waited for.
TEST_F(GuardTest, WhatCannotBeCopiedIsSkipped) {
  core().options().guard.bytes = kMiB;
  TestStream stream;
  std::vector<CUdeviceptr> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(core().MallocAsync(1000, stream));
  Gate gate;
  gate.Hold(stream);
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().FreeAsync(p, stream));
  EXPECT_GT(skipped(), 0u);
  EXPECT_LT(skipped(), 99u);
  gate.Open();
  stream.Finish();
  Poll();
  EXPECT_EQ(overwritten(), 0u);
}

}  // namespace
}  // namespace cushion
