// Bins: the block found always fits, and comes from the smallest bin that has one.
#include "core/bins.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <random>
#include <set>
#include <vector>

namespace cushion {
namespace {

// A size class by its definition: one for each of 0..31 units, then 32 to each power of two. Its smallest size, in
// units.
std::uint64_t class_of(std::uint64_t size) {
  std::uint64_t units = size / kUnit;
  std::uint64_t step = 1;
  while (units / step >= 64) step *= 2;
  return units / step * step;
}

class BinsTest : public testing::Test {
 protected:
  Block* insert(std::uint64_t size, std::uint64_t address = 0, std::uint64_t stamp = 0) {
    Block& block = blocks_.emplace_back();
    block.set(address, BlockState::free);
    block.size = size;
    block.idle.stamp = stamp;
    bins.insert(&block);
    return &block;
  }
  Block* find(std::uint64_t size) const { return bins.find(size, kUnit, kAnyStamp); }

  Bins bins;

 private:
  std::deque<Block> blocks_;
};

// The sizes on either side of every class boundary that a device of 2^48 bytes can have.
std::vector<std::uint64_t> boundaries() {
  std::set<std::uint64_t> units;
  for (std::uint64_t step = 1; step <= std::uint64_t{1} << 33; step *= 2) {
    for (std::uint64_t column = 32; column < 64; ++column) {
      for (const std::uint64_t near : {column * step - 1, column * step, column * step + 1}) units.insert(near);
    }
  }
  for (std::uint64_t small = 1; small < 32; ++small) units.insert(small);
  std::vector<std::uint64_t> sizes;
  for (const std::uint64_t u : units) sizes.push_back(u * kUnit);
  return sizes;
}

TEST_F(BinsTest, ABlockServesItsOwnSizeAndNothingLarger) {
  for (const std::uint64_t size : boundaries()) {
    Block* block = insert(size);
    EXPECT_EQ(find(size), block) << size;
    EXPECT_EQ(find(size - kUnit + 1), block) << size;
    EXPECT_EQ(find(size + 1), nullptr) << size;
    EXPECT_EQ(find(size + kUnit), nullptr) << size;
    bins.remove(block);
    ASSERT_TRUE(bins.empty()) << size;
  }
}

TEST_F(BinsTest, TheSmallestOfTheBoundarySizesThatFitsIsFound) {
  std::vector<Block*> blocks;
  for (const std::uint64_t size : boundaries()) blocks.push_back(insert(size));
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i) {
    EXPECT_EQ(find(blocks[i]->size), blocks[i]);
    EXPECT_EQ(find(blocks[i]->size + 1), blocks[i + 1]) << blocks[i]->size;
  }
  EXPECT_EQ(find(blocks.back()->size + 1), nullptr);
}

TEST_F(BinsTest, WithinABinTheBestFitIsTaken) {
  // 64 to 65 units share a bin.
  insert(65 * kUnit);
  Block* exact = insert(64 * kUnit);
  insert(65 * kUnit);
  EXPECT_EQ(find(64 * kUnit), exact);
  bins.remove(exact);
  EXPECT_EQ(find(64 * kUnit)->size, 65 * kUnit);
}

TEST_F(BinsTest, AlignmentCountsWhatIsSkipped) {
  constexpr std::uint64_t kAlign = 64 << 10;
  Block* off = insert(2 * kAlign, kAlign + kUnit);
  EXPECT_EQ(bins.find(2 * kAlign, kAlign, kAnyStamp), nullptr);
  EXPECT_EQ(bins.find(kAlign + kUnit, kAlign, kAnyStamp), off);
  EXPECT_EQ(bins.find(kAlign + 2 * kUnit, kAlign, kAnyStamp), nullptr);
  Block* on = insert(2 * kAlign, 8 * kAlign);
  EXPECT_EQ(bins.find(2 * kAlign, kAlign, kAnyStamp), on);
}

TEST_F(BinsTest, ABlockFreedLaterThanTheStampIsNotFound) {
  Block* late = insert(kUnit, 0, 8);
  Block* early = insert(4 * kUnit, 0, 5);
  EXPECT_EQ(bins.find(kUnit, kUnit, 7), early);
  EXPECT_EQ(bins.find(kUnit, kUnit, 8), late);
  EXPECT_EQ(bins.find(kUnit, kUnit, 4), nullptr);
}

TEST_F(BinsTest, AFittingBlockIsFoundBehindAnyNumberThatDoNotFit) {
  Block* fits = insert(65 * kUnit);
  for (int i = 0; i < 100; ++i) insert(64 * kUnit);
  EXPECT_EQ(find(65 * kUnit), fits);
}

TEST_F(BinsTest, ForEachVisitsAllAndTheVisitorMayRemove) {
  std::set<Block*> all;
  for (const std::uint64_t size : boundaries()) all.insert(insert(size));
  std::set<Block*> seen;
  bins.for_each([&](Block* block) {
    seen.insert(block);
    bins.remove(block);
  });
  EXPECT_EQ(seen, all);
  EXPECT_TRUE(bins.empty());
}

TEST_F(BinsTest, AgreesWithASearchOfEverything) {
  std::mt19937_64 random(1);
  const auto size = [&] {
    const unsigned bits = static_cast<unsigned>(random() % 30);
    return (1 + random() % (std::uint64_t{2} << bits)) * kUnit;
  };
  std::vector<Block*> in;
  for (int step = 0; step < 20'000; ++step) {
    if (in.size() < 200 && random() % 2 == 0) {
      in.push_back(insert(size(), random() % 1024 * kUnit, random() % 16));
    } else if (!in.empty()) {
      std::swap(in[random() % in.size()], in.back());
      bins.remove(in.back());
      in.pop_back();
    }
    const std::uint64_t want = size();
    const std::uint64_t alignment = random() % 2 == 0 ? kUnit : kBigAlignment;
    const std::uint64_t stamp = random() % 18;
    std::uint64_t best_class = 0;
    for (const Block* b : in) {
      if (!Bins::fits(*b, want, alignment) || b->idle.stamp > stamp) continue;
      if (best_class == 0 || class_of(b->size) < best_class) best_class = class_of(b->size);
    }
    const Block* found = bins.find(want, alignment, stamp);
    if (best_class == 0) {
      ASSERT_EQ(found, nullptr);
    } else {
      ASSERT_NE(found, nullptr);
      ASSERT_TRUE(Bins::fits(*found, want, alignment));
      ASSERT_LE(found->idle.stamp, stamp);
      ASSERT_EQ(class_of(found->size), best_class);
    }
    ASSERT_EQ(bins.empty(), in.empty());
  }
}

}  // namespace
}  // namespace cushion
