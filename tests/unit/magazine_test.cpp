// Magazine: it caches what is allocated again and again, hands a block out once, and never more than it may hold.
#include "core/magazine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <vector>

namespace cushion {
namespace {

constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
constexpr std::uint64_t kAnyStamp = ~std::uint64_t{0};

class MagazineTest : public testing::Test {
 protected:
  Block* block(std::uint64_t size) {
    Block& made = blocks_.emplace_back();
    made.size = size;
    return &made;
  }
  // As a lane allocates: null is a miss, which the magazine was told.
  Block* allocate(std::uint64_t size, std::uint64_t through = kAnyStamp) {
    Block* found = magazine.take(size, through);
    if (found == nullptr) magazine.missed(size, displaced);
    return found;
  }
  // So often that its blocks are cached.
  void warm(std::uint64_t size) {
    for (int i = 0; i < 16; ++i) allocate(size);
  }
  Magazine::Given give(Block* b, std::uint64_t stamp = 0, std::uint64_t limit = kNoLimit) {
    return magazine.give(b, stamp, limit);
  }

  Magazine magazine;
  Magazine::Entries displaced;

 private:
  std::deque<Block> blocks_;
};

TEST_F(MagazineTest, ASizeThatWasAskedForOnceIsNotCached) {
  allocate(1024);
  EXPECT_EQ(give(block(1024)), Magazine::Given::unwanted);
  EXPECT_TRUE(magazine.empty());
}

TEST_F(MagazineTest, WhatIsOnlyFreedIsNotCached) {
  for (int i = 0; i < 100; ++i) EXPECT_EQ(give(block(1024)), Magazine::Given::unwanted);
}

TEST_F(MagazineTest, ASizeThatCameAgainIsCachedAndComesBackOnce) {
  warm(1024);
  Block* b = block(1024);
  EXPECT_EQ(give(b), Magazine::Given::kept);
  EXPECT_EQ(allocate(2048), nullptr);
  EXPECT_EQ(allocate(1024), b);
  EXPECT_EQ(allocate(1024), nullptr);
  EXPECT_TRUE(magazine.empty());
}

TEST_F(MagazineTest, OnlyWhatWasFreedEarlyEnoughIsHandedOut) {
  warm(512);
  Block* early = block(512);
  Block* late = block(512);
  give(early, 5);
  give(late, 9);
  EXPECT_EQ(allocate(512, 4), nullptr);
  EXPECT_EQ(allocate(512, 5), early);
  EXPECT_EQ(allocate(512, 8), nullptr);
  EXPECT_EQ(allocate(512, 9), late);
}

TEST_F(MagazineTest, TheNewestThatIsCleanComesFirst) {
  warm(512);
  std::vector<Block*> blocks;
  for (std::uint64_t stamp = 1; stamp <= 3; ++stamp) {
    blocks.push_back(block(512));
    give(blocks.back(), stamp);
  }
  EXPECT_EQ(allocate(512), blocks[2]);
  EXPECT_EQ(allocate(512, 1), blocks[0]);
  EXPECT_EQ(allocate(512), blocks[1]);
}

TEST_F(MagazineTest, IsFullAtItsDepthAndAtItsLimit) {
  warm(512);
  for (unsigned i = 0; i < Magazine::kDepth; ++i) EXPECT_EQ(give(block(512)), Magazine::Given::kept);
  EXPECT_EQ(give(block(512)), Magazine::Given::full);
  warm(1 << 20);
  EXPECT_EQ(give(block(1 << 20), 0, (1 << 20) + 512 * Magazine::kDepth), Magazine::Given::kept);
  EXPECT_EQ(give(block(1 << 20), 0, (1 << 20) + 512 * Magazine::kDepth), Magazine::Given::full);
  EXPECT_EQ(give(block(1 << 20), 0, (1 << 20) - 512), Magazine::Given::unwanted);
}

TEST_F(MagazineTest, ARingThatGoesRoundLosesNothing) {
  warm(512);
  std::deque<Block*> inside;
  for (int i = 0; i < 1000; ++i) {
    inside.push_back(block(512));
    ASSERT_EQ(give(inside.back(), static_cast<std::uint64_t>(i) + 1), Magazine::Given::kept);
    if (i % 3 == 0 || inside.size() == Magazine::kDepth) {  // the oldest only: as a host lane that waits for fences
      ASSERT_EQ(allocate(512, static_cast<std::uint64_t>(i) + 2 - inside.size()), inside.front());
      inside.pop_front();
    }
  }
}

TEST_F(MagazineTest, ASizeThatIsAskedForMoreOftenTakesTheSlotAndWhatWasInItIsGivenBack) {
  warm(512);
  Block* old = block(512);
  give(old);
  std::uint64_t rival = 0;  // a size of the same slot: the first that displaces
  for (std::uint64_t size = 1024; rival == 0 && size < 4096 * kUnit; size += kUnit) {
    Magazine other;
    for (int i = 0; i < 16; ++i) other.missed(512, displaced);
    for (int i = 0; i < 16; ++i) other.missed(size, displaced);
    if (other.give(block(512), 0, kNoLimit) == Magazine::Given::unwanted) rival = size;
  }
  ASSERT_NE(rival, 0u);
  displaced.count = 0;
  for (int i = 0; displaced.count == 0 && i < 100; ++i) allocate(rival);
  ASSERT_EQ(displaced.count, 1u);
  EXPECT_EQ(displaced.entry[0].block, old);
  EXPECT_TRUE(magazine.empty());
}

TEST_F(MagazineTest, DrainTakesOutEverything) {
  std::vector<Block*> inside;
  for (const std::uint64_t size : {512, 1024, 4096}) {
    warm(size);
    for (int i = 0; i < 5; ++i) {
      inside.push_back(block(size));
      ASSERT_EQ(give(inside.back(), 3), Magazine::Given::kept);
    }
  }
  std::vector<Block*> out;
  Magazine::Entries entries;
  while (magazine.drain(entries)) {
    for (unsigned i = 0; i < entries.count; ++i) {
      EXPECT_EQ(entries.entry[i].stamp, 3u);
      out.push_back(entries.entry[i].block);
    }
  }
  std::sort(inside.begin(), inside.end());
  std::sort(out.begin(), out.end());
  EXPECT_EQ(out, inside);
  EXPECT_TRUE(magazine.empty());
}

}  // namespace
}  // namespace cushion
