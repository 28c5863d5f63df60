// Magazine: it caches what is allocated, hands a block out once and only to who may have it, and never holds more than
// it may.
#include "core/magazine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <vector>

namespace cushion {
namespace {

constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
constexpr std::uint64_t kAny = kAnyStamp;

class MagazineTest : public testing::Test {
 protected:
  Block* block(std::uint64_t size) {
    Block& made = blocks_.emplace_back();
    made.size = size;
    return &made;
  }
  void want(std::uint64_t size) { EXPECT_EQ(magazine.take(size, kAny), nullptr); }
  Magazine::Given give(Block* b, std::uint64_t stamp = 0, std::uint64_t limit = kNoLimit) {
    return magazine.give(b, stamp, limit);
  }

  Magazine magazine;

 private:
  std::deque<Block> blocks_;
};

TEST(Classes, EverySizeRoundsUpToTheBeginningOfABinAtMostThreePercentAway) {
  for (std::uint64_t size = kUnit; size <= 4 * Magazine::kLargest; size += size < 1 << 20 ? kUnit : 8191 * kUnit) {
    const std::uint64_t rounded = Bins::round_up_to_bin(size);
    ASSERT_GE(rounded, size);
    ASSERT_LE(rounded - size, size / 32) << size;
    ASSERT_EQ(Bins::round_up_to_bin(rounded), rounded) << size;
    ASSERT_EQ(rounded % kUnit, 0u);
    if (rounded > kUnit) {
      ASSERT_LT(Bins::bin_of(rounded - kUnit), Bins::bin_of(rounded)) << size;
    }
    if (size > kBigRequest && size % kBigAlignment == 0) {
      ASSERT_EQ(rounded % kBigAlignment, 0u);
    }
  }
}

TEST_F(MagazineTest, WhatIsOnlyFreedIsNotCached) {
  EXPECT_EQ(give(block(1024)), Magazine::Given::unwanted);
  want(2048);
  EXPECT_EQ(give(block(1024)), Magazine::Given::unwanted);
  EXPECT_TRUE(magazine.empty());
}

TEST_F(MagazineTest, ABlockComesBackOnceAndToItsClassAlone) {
  want(1024);
  Block* b = block(1024);
  EXPECT_EQ(give(b), Magazine::Given::kept);
  EXPECT_EQ(magazine.take(512, kAny), nullptr);
  EXPECT_EQ(magazine.take(1536, kAny), nullptr);
  EXPECT_EQ(magazine.take(1024, 0), b);
  EXPECT_EQ(magazine.take(1024, kAny), nullptr);
  EXPECT_TRUE(magazine.empty());
}

TEST_F(MagazineTest, BlocksThatAreTooLargeAreNotCached) {
  EXPECT_EQ(magazine.take(2 * Magazine::kLargest, kAny), nullptr);
  EXPECT_EQ(give(block(2 * Magazine::kLargest)), Magazine::Given::unwanted);
  want(Magazine::kLargest);
  EXPECT_EQ(give(block(Magazine::kLargest)), Magazine::Given::kept);
}

TEST_F(MagazineTest, AStreamHasItsOwnFreesAtOnceTheNewestFirst) {
  want(512);
  Block* first = block(512);
  Block* second = block(512);
  give(first, 5);
  give(second, 9);
  EXPECT_EQ(magazine.take(512, kAny), second);
  EXPECT_EQ(magazine.take(512, kAny), first);
}

TEST_F(MagazineTest, AHostLaneHasWhatIsCleanAndNothingElse) {
  want(512);
  Block* early = block(512);
  Block* late = block(512);
  give(early, 5);
  give(late, 9);
  EXPECT_EQ(magazine.take(512, 4), nullptr);
  EXPECT_EQ(magazine.take(512, 8), nullptr);  // of the stack only the top is looked at
  EXPECT_EQ(magazine.take(512, 9), late);
  Block* later = block(512);
  give(later, 12);
  EXPECT_EQ(magazine.take(512, 9), early);  // found clean together with what lay above it
  EXPECT_EQ(magazine.take(512, 9), nullptr);
  EXPECT_EQ(magazine.take(512, 12), later);
}

TEST_F(MagazineTest, WhatWasFreedCleanNeverWaits) {
  want(512);
  Block* unclean = block(512);
  Block* clean = block(512);
  give(unclean, 7);
  give(clean);
  EXPECT_EQ(magazine.take(512, 0), clean);
  EXPECT_EQ(magazine.take(512, 6), nullptr);
}

TEST_F(MagazineTest, ABatchOfUncleanFreesIsDueAndOfCleanOnesNever) {
  want(512);
  for (unsigned i = 1; i <= 3 * Magazine::kBatch; ++i)
    EXPECT_EQ(give(block(512), i), i % Magazine::kBatch == 0 ? Magazine::Given::due : Magazine::Given::kept) << i;
  for (unsigned i = 1; i <= 3 * Magazine::kBatch; ++i) EXPECT_EQ(give(block(512)), Magazine::Given::kept);
}

TEST_F(MagazineTest, HoldsNoMoreThanItsLimitAndSaysWhoseRoomItIs) {
  want(1024);
  want(2048);
  EXPECT_EQ(give(block(1024), 0, 2048), Magazine::Given::kept);
  EXPECT_EQ(give(block(2048), 0, 2048), Magazine::Given::crowded);
  EXPECT_EQ(give(block(1024), 0, 2048), Magazine::Given::kept);
  EXPECT_EQ(give(block(1024), 0, 2048), Magazine::Given::full);
  EXPECT_EQ(give(block(2048), 0, 1024), Magazine::Given::unwanted);
  EXPECT_EQ(give(block(1024), 0, 0), Magazine::Given::unwanted);
}

TEST_F(MagazineTest, DrainTakesOutEverythingWithItsStampAndNothingIsWantedAfterwards) {
  std::vector<std::pair<Block*, std::uint64_t>> inside;
  for (const std::uint64_t size : {512, 1024, 4096}) {
    want(size);
    for (std::uint64_t stamp : {0, 3, 0, 4}) {
      inside.emplace_back(block(size), stamp);
      ASSERT_EQ(give(inside.back().first, stamp), Magazine::Given::kept);
    }
  }
  std::vector<std::pair<Block*, std::uint64_t>> out;
  unsigned at = 0;
  while (Block* stack = magazine.drain(at)) {
    for (; stack != nullptr; stack = Magazine::next_of(*stack)) out.emplace_back(stack, Magazine::stamp_of(*stack));
  }
  std::sort(inside.begin(), inside.end());
  std::sort(out.begin(), out.end());
  EXPECT_EQ(out, inside);
  EXPECT_TRUE(magazine.empty());
  EXPECT_EQ(give(block(512)), Magazine::Given::unwanted);
}

TEST_F(MagazineTest, DrainEndsThoughTheOwnerGoesOn) {
  want(512);
  ASSERT_EQ(give(block(512)), Magazine::Given::kept);
  unsigned at = 0;
  int stacks = 0;
  for (; magazine.drain(at) != nullptr && stacks < 10; ++stacks) {
    want(512);
    ASSERT_EQ(give(block(512), 7), Magazine::Given::kept);
  }
  EXPECT_LE(stacks, 2);  // what was clean, and what was not
}

}  // namespace
}  // namespace cushion
