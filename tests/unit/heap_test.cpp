// Heap: what is ordered before a stream only grows, and only for others.
#include "core/heap.h"

#include <gtest/gtest.h>

namespace cushion {
namespace {

class HeapTest : public testing::Test {
 protected:
  HeapTest() { heap.serial = 3; }

  // 0: nothing of that heap is ordered before this one.
  std::uint64_t before(std::uint64_t serial) const {
    std::uint64_t stamp = 0;
    int entries = 0;
    for (const Heap::Before& b : heap.before) {
      if (b.serial != serial) continue;
      stamp = b.stamp;
      ++entries;
    }
    EXPECT_LE(entries, 1);
    return stamp;
  }

  Heap heap;
};

TEST_F(HeapTest, ANewHeapComesAfterNothing) { EXPECT_TRUE(heap.before.empty()); }

TEST_F(HeapTest, ALaterWaitCoversMore) {
  heap.order_after({7, 10, 0});
  EXPECT_EQ(before(7), 10u);
  heap.order_after({7, 12, 0});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(HeapTest, AWaitOnAnOlderEventTakesNothingBack) {
  heap.order_after({7, 12, 0});
  heap.order_after({7, 10, 0});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(HeapTest, HeapsAreToldApart) {
  heap.order_after({7, 12, 0});
  heap.order_after({8, 20, 0});
  EXPECT_EQ(before(7), 12u);
  EXPECT_EQ(before(8), 20u);
  EXPECT_EQ(before(9), 0u);
}

TEST_F(HeapTest, OfTooManyOrdersTheOldestIsForgotten) {
  for (std::uint64_t i = 0; i < Heap::kMostBefore; ++i) heap.order_after({100 + i, 50 + i, 0});
  heap.order_after({7, 60, 0});
  EXPECT_EQ(heap.before.size(), Heap::kMostBefore);
  EXPECT_EQ(before(7), 60u);
  EXPECT_EQ(before(100), 0u);
  EXPECT_EQ(before(101), 51u);
  heap.order_after({8, 1, 0});  // older than all: not worth another's place
  EXPECT_EQ(before(8), 0u);
  EXPECT_EQ(before(101), 51u);
}

TEST_F(HeapTest, ItsOwnEventsSayNothing) {
  heap.order_after({3, 5, 0});
  EXPECT_TRUE(heap.before.empty());
}

}  // namespace
}  // namespace cushion
