// What the benchmarks rely on of traces.h.
#include "traces.h"

#include <gtest/gtest.h>

namespace bench {
namespace {

// Every slot is allocated before it is freed, never twice, and nothing stays; the peak is that of a plain count.
void expect_balanced(const Trace& trace) {
  std::vector<std::size_t> bytes(trace.slots());
  std::size_t live = 0;
  std::size_t peak = 0;
  for (const Trace::Step& step : trace.steps()) {
    std::size_t& in_slot = bytes.at(step.slot);
    ASSERT_GT(step.bytes, 0U);
    ASSERT_EQ(in_slot, step.allocation ? 0 : step.bytes);
    in_slot = step.allocation ? step.bytes : 0;
    live = step.allocation ? live + step.bytes : live - step.bytes;
    peak = std::max(peak, live);
  }
  EXPECT_EQ(live, 0U);
  EXPECT_EQ(trace.peak(), peak);
}

TEST(Traces, AreBalanced) {
  expect_balanced(uniform_trace(1000, MiB, 100 * MiB));
  expect_balanced(power_law_trace(1000, KiB, GiB, 16000 * MiB));
  expect_balanced(shuffle_trace(1000));
  expect_balanced(training_trace(3));
}

TEST(Traces, UniformStaysBelowItsLimitAndDrawsTheSameEachTime) {
  const Trace trace = uniform_trace(1000, 4 * MiB, 100 * MiB);
  EXPECT_EQ(trace.steps().size(), 2000U);
  EXPECT_LT(trace.peak(), 100 * MiB);
  EXPECT_GT(trace.peak(), 90 * MiB);
  const Trace again = uniform_trace(1000, 4 * MiB, 100 * MiB);
  for (std::size_t i = 0; i < trace.steps().size(); ++i) ASSERT_EQ(trace.steps()[i].bytes, again.steps()[i].bytes);
}

TEST(Traces, PowerLawHasAsManyBytesInEveryPowerOfTwo) {
  const Trace trace = power_law_trace(200000, KiB, 64 * KiB, GiB);
  std::size_t small = 0;
  std::size_t large = 0;
  for (const Trace::Step& step : trace.steps()) {
    ASSERT_GE(step.bytes, KiB);
    ASSERT_LE(step.bytes, 64 * KiB);
    (step.bytes < 8 * KiB ? small : large) += step.bytes;
  }
  EXPECT_NEAR(static_cast<double>(small) / static_cast<double>(large), 1, 0.05);
}

TEST(BestFit, HoldsWhatIsLiveWhereNothingFragments) {
  Trace trace;
  const auto a = trace.allocate(1);
  const auto b = trace.allocate(513);
  EXPECT_EQ(best_fit_peak(trace), 512U + 1024U);
  trace.free(a);
  trace.free(b);
  trace.free(trace.allocate(1536));  // both holes as one
  EXPECT_EQ(best_fit_peak(trace), 512U + 1024U);
}

TEST(BestFit, TakesTheSmallestHoleThatFits) {
  Trace trace;
  const auto large = trace.allocate(4 * KiB);
  trace.allocate(KiB);
  const auto small = trace.allocate(2 * KiB);
  trace.allocate(KiB);
  trace.free(large);
  trace.free(small);
  trace.allocate(2 * KiB);
  trace.allocate(4 * KiB);  // its hole is whole
  EXPECT_EQ(best_fit_peak(trace), 8 * KiB);
}

TEST(BestFit, GrowsByWhatTheLastHoleLacks) {
  Trace trace;
  trace.allocate(KiB);
  trace.free(trace.allocate(KiB));
  trace.allocate(4 * KiB);
  EXPECT_EQ(best_fit_peak(trace), 5 * KiB);
}

TEST(BestFit, CannotUseAHoleThatIsTooSmall) {
  Trace trace;
  const auto first = trace.allocate(KiB);
  trace.allocate(KiB);
  trace.free(first);
  trace.allocate(2 * KiB);
  EXPECT_EQ(best_fit_peak(trace), 4 * KiB);
}

}  // namespace
}  // namespace bench
