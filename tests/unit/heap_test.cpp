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
  heap.order_after({7, 10});
  EXPECT_EQ(before(7), 10u);
  heap.order_after({7, 12});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(HeapTest, AWaitOnAnOlderEventTakesNothingBack) {
  heap.order_after({7, 12});
  heap.order_after({7, 10});
  EXPECT_EQ(before(7), 12u);
}

TEST_F(HeapTest, HeapsAreToldApart) {
  heap.order_after({7, 12});
  heap.order_after({8, 20});
  EXPECT_EQ(before(7), 12u);
  EXPECT_EQ(before(8), 20u);
  EXPECT_EQ(before(9), 0u);
}

TEST_F(HeapTest, ItsOwnEventsSayNothing) {
  heap.order_after({3, 5});
  EXPECT_TRUE(heap.before.empty());
}

}  // namespace
}  // namespace cushion
