// Lane: what is ordered before a stream only grows, and only for others; an ended lane cannot be entered.
#include "core/lane.h"

#include <gtest/gtest.h>

namespace cushion {
namespace {

class LaneTest : public testing::Test {
 protected:
  LaneTest() {
    const StreamIdentity stream{nullptr, 17, 0, {}};
    lane.open(3, &stream);
  }

  // 0: nothing of that lane is ordered before this one.
  std::uint64_t before(std::uint64_t serial) const {
    std::uint64_t stamp = 0;
    int entries = 0;
    for (const Lane::Before& b : lane.before) {
      if (b.serial != serial) continue;
      stamp = b.stamp;
      ++entries;
    }
    EXPECT_LE(entries, 1);
    return stamp;
  }

  Gauges gauges;
  Lane lane{0, gauges};
};

TEST_F(LaneTest, ANewLaneComesAfterNothing) { EXPECT_TRUE(lane.before.empty()); }

TEST_F(LaneTest, ALaterWaitCoversMore) {
  lane.order_after({7, 10, nullptr});
  EXPECT_EQ(before(7), 10u);
  lane.order_after({7, 12, nullptr});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(LaneTest, AWaitOnAnOlderEventTakesNothingBack) {
  lane.order_after({7, 12, nullptr});
  lane.order_after({7, 10, nullptr});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(LaneTest, HeapsAreToldApart) {
  lane.order_after({7, 12, nullptr});
  lane.order_after({8, 20, nullptr});
  EXPECT_EQ(before(7), 12u);
  EXPECT_EQ(before(8), 20u);
  EXPECT_EQ(before(9), 0u);
}

TEST_F(LaneTest, OfTooManyOrdersTheOldestIsForgotten) {
  for (std::uint64_t i = 0; i < Lane::kMostBefore; ++i) lane.order_after({100 + i, 50 + i, nullptr});
  lane.order_after({7, 60, nullptr});
  EXPECT_EQ(lane.before.size(), Lane::kMostBefore);
  EXPECT_EQ(before(7), 60u);
  EXPECT_EQ(before(100), 0u);
  EXPECT_EQ(before(101), 51u);
  lane.order_after({8, 1, nullptr});  // older than all: not worth another's place
  EXPECT_EQ(before(8), 0u);
  EXPECT_EQ(before(101), 51u);
}

TEST_F(LaneTest, ItsOwnEventsSayNothing) {
  lane.order_after({3, 5, nullptr});
  EXPECT_TRUE(lane.before.empty());
}

TEST_F(LaneTest, AnEndedLaneIsEnteredByNobodyAndAnotherIncarnationIsAnother) {
  EXPECT_TRUE(lane.enter(3));
  lane.order_after({7, 12, nullptr});
  lane.end();
  lane.leave();
  EXPECT_FALSE(lane.enter(3));
  EXPECT_FALSE(lane.enter(0));
  lane.open(4, nullptr);
  EXPECT_FALSE(lane.enter(3));
  EXPECT_TRUE(lane.before.empty());
  EXPECT_FALSE(lane.is_stream());
  EXPECT_TRUE(lane.enter(4));
  lane.leave();
}

TEST(Tally, WhatOneThreadCountsHasExactPeaks) {
  Gauges gauges;
  Tally tally(gauges);
  tally.allocated(0, 100, 512);
  tally.allocated(0, 100, 512);
  tally.freed(100, 512);
  tally.allocated(1, 1, 512);
  tally.settle();
  EXPECT_EQ(gauges.requested.current(), 101u);
  EXPECT_EQ(gauges.requested.peak(), 200u);
  EXPECT_EQ(gauges.handed_out.peak(), 1024u);
  tally.freed(100, 512);
  tally.freed(1, 512);
  tally.settle();
  EXPECT_EQ(gauges.requested.current(), 0u);
  EXPECT_EQ(gauges.requested.peak(), 200u);
  EXPECT_EQ(tally.served[0], 2u);
  EXPECT_EQ(tally.served[1], 1u);
  EXPECT_EQ(tally.frees, 3u);
}

TEST(Tally, MuchGoesToTheGaugesAtOnce) {
  Gauges gauges;
  Tally tally(gauges);
  tally.allocated(0, 1, Tally::kMost);
  EXPECT_EQ(gauges.handed_out.current(), static_cast<std::uint64_t>(Tally::kMost));
  tally.freed(1, Tally::kMost);
  EXPECT_EQ(gauges.handed_out.current(), 0u);
  EXPECT_EQ(gauges.handed_out.peak(), static_cast<std::uint64_t>(Tally::kMost));
}

}  // namespace
}  // namespace cushion
