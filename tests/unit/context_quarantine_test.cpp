// Quarantine: freed blocks stay away, what is written to them is found, and nothing waits for them (core/quarantine.h).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/quarantine.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

constexpr std::uint64_t kMost = 64 << 10;  // bytes held
constexpr std::uint64_t kBlock = 32 << 10;

class QuarantineTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (!IsSkipped()) core().options().quarantine.bytes = kMost;
  }
  void Write(CUdeviceptr at, std::uint64_t bytes, CUstream stream = nullptr) {
    CHECK_CU(0, driver().MemsetD8Async(at, 7, bytes, stream));
  }
  // Takes and frees blocks until all that was held before has gone.
  void Push() {
    for (std::uint64_t bytes = 0; bytes < kMost; bytes += kBlock) CHECK_CU(0, core().Free(core().Malloc(kBlock)));
  }
  void PushOn(const TestStream& stream) {
    for (std::uint64_t bytes = 0; bytes < kMost; bytes += kBlock)
      CHECK_CU(0, core().FreeAsync(core().MallocAsync(kBlock, stream), stream));
  }
  Quarantine& quarantine() { return core().context().quarantine(); }
  std::uint64_t overwritten() { return counters().quarantine_overwritten; }
  std::uint64_t skipped() { return counters().quarantine_skipped; }
};

TEST_F(QuarantineTest, WhatIsHeldIsNeitherLiveNorHandedOut) {
  const CUdeviceptr p = core().Malloc(1000);
  const std::uint64_t held = core().held();
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(quarantine().bytes(), 1024u);
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().usage().handed_out.current(), 0u);
  EXPECT_EQ(core().held(), held);
  EXPECT_EQ(core().frees(), 1u);
  std::uint64_t live = 0;
  core().context().inspect(Patience::some, [&](const Pool& pool) { pool.for_each_live([&](const auto&) { ++live; }); });
  EXPECT_EQ(live, 0u);
  EXPECT_NE(core().Malloc(1000), p);
  EXPECT_EQ(core().FreeBlock(core().BlockAt(p), p), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(QuarantineTest, TheFirstInIsTheFirstOut) {
  const CUdeviceptr p = core().Malloc(kBlock);
  const CUdeviceptr q = core().Malloc(kBlock);
  const CUdeviceptr r = core().Malloc(kBlock);
  for (const CUdeviceptr each : {p, q, r}) CHECK_CU(0, core().Free(each));
  EXPECT_EQ(quarantine().bytes(), kMost);
  core().context().unused();  // asks the fences
  EXPECT_EQ(core().Malloc(kBlock), p);
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(QuarantineTest, AWriteAfterTheFreeIsFound) {
  const CUdeviceptr p = core().Malloc(kBlock - 100);
  CHECK_CU(0, core().Free(p));
  Write(p + 20, 5);
  Write(p + kBlock - 1, 1);  // behind its end, too
  Synchronize();
  testing::internal::CaptureStderr();
  Push();
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("written to after its free, a block of 32668 bytes at 0x"), std::string::npos) << text;
  EXPECT_NE(text.find(": 6 bytes, the first at offset 20\n"), std::string::npos) << text;
  EXPECT_EQ(overwritten(), 1u);
}

TEST_F(QuarantineTest, AStreamOrderedFreeFillsInItsOrderAndWaitsForNothing) {
  TestStream stream;
  TestStream other;
  const CUdeviceptr p = core().MallocAsync(kBlock, stream);
  Gate gate;
  gate.Hold(stream);
  Write(p, kBlock, stream);  // by right
  CHECK_CU(0, core().FreeAsync(p, stream));
  PushOn(other);  // its time has come, but it is not filled
  EXPECT_TRUE(stream.Busy());
  EXPECT_EQ(quarantine().bytes(), kMost + kBlock);
  PushOn(other);  // twice the bytes
  EXPECT_EQ(skipped(), 1u);
  EXPECT_TRUE(stream.Busy());
  EXPECT_NE(core().Malloc(kBlock), p);  // not clean yet
  gate.Open();
  stream.Finish();
  other.Finish();
  quarantine().empty();
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 1u);
}

TEST_F(QuarantineTest, ACudaFreeWithoutAWaitFillsBehindAllWork) {
  core().options().free = FreeMode::deferred;
  TestStream stream;
  const CUdeviceptr p = core().Malloc(kBlock);
  Gate gate;
  gate.Hold(stream);
  Write(p, kBlock, stream);  // by right
  CHECK_CU(0, core().Free(p));
  EXPECT_TRUE(stream.Busy());
  gate.Open();
  Synchronize();
  EXPECT_TRUE(quarantine().empty());
  EXPECT_EQ(overwritten(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(QuarantineTest, ShortMemoryEmptiesIt) {
  core().options().quarantine.bytes = kSegment;
  core().options().max_size = {kSegment};
  const CUdeviceptr p = core().Malloc(kSegment);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(quarantine().bytes(), kSegment);
  EXPECT_EQ(core().Malloc(kSegment), p);
  EXPECT_EQ(quarantine().bytes(), 0u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(QuarantineTest, LargerBlocksAreNotHeld) {
  const CUdeviceptr p = core().Malloc(kMost + 1);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(quarantine().bytes(), 0u);
  EXPECT_EQ(core().Malloc(kMost + 1), p);
}

TEST_F(QuarantineTest, ItIsLookedAtBeforeItsContextEndsAndThenForgotten) {
  const CUdeviceptr p = core().Malloc(kBlock);
  CHECK_CU(0, core().Free(p));
  Write(p, 1);
  Synchronize();
  testing::internal::CaptureStderr();
  core().context().closing(true);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(overwritten(), 1u);
  core().context().closing(false);
  CHECK_CU(0, core().Free(core().Malloc(kBlock)));
  core().context().discard();
  EXPECT_EQ(quarantine().bytes(), 0u);
  core().context().revive();
  Push();
  quarantine().empty();
  EXPECT_EQ(overwritten(), 1u);
  EXPECT_EQ(skipped(), 0u);
}

TEST_F(QuarantineTest, BesideACaptureNothingIsHeldOrLookedAt) {
  const CUdeviceptr p = core().Malloc(kBlock);
  const CUdeviceptr q = core().Malloc(kBlock);
  CHECK_CU(0, core().Free(p));
  core().shared.gate.begin();
  CHECK_CU(0, core().Free(q));
  EXPECT_EQ(quarantine().bytes(), kBlock);
  quarantine().empty();
  core().shared.gate.begun(nullptr, nullptr, 0, false);
  EXPECT_EQ(skipped(), 1u);
}

TEST_F(QuarantineTest, GuardsAreLookedAtFirst) {
  core().options().guard.bytes = 64;
  const CUdeviceptr p = core().Malloc(1000);
  Write(p + 1000, 1);
  testing::internal::CaptureStderr();
  CHECK_CU(0, core().Free(p));
  quarantine().empty();
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(counters().guards_overwritten, 1u);
  EXPECT_EQ(overwritten(), 0u);
}

TEST_F(QuarantineTest, UnderPressureStreamsStillHaveTheirBlocksBack) {
  core().options().quarantine.bytes = kSegment;
  core().options().max_size = {kSegment};
  TestStream stream;
  for (int i = 0; i < 5; ++i) {
    const CUdeviceptr p = core().MallocAsync(kSegment, stream);
    ASSERT_NE(p, 0u) << i;
    CHECK_CU(0, core().FreeAsync(p, stream));
    stream.Finish();
  }
  EXPECT_EQ(overwritten(), 0u);
}

}  // namespace
}  // namespace cushion
