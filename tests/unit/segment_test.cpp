// Segment and slab: records stay readable for ever, and a table finds only what begins exactly there.
#include "core/segment.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "tests/unit/eternal.h"

namespace cushion {
namespace {

constexpr std::uint64_t kBase = std::uint64_t{0x7e00} << 32;
constexpr std::uint64_t kSize = std::uint64_t{2} << 20;

TEST(Slab, MakesValueInitialisedRecordsThatDoNotOverlap) {
  Slab<Block>& slab = eternal<Slab<Block>>();
  std::set<Block*> made;
  for (int i = 0; i < 40'000; ++i) {  // more than one piece of memory
    Block* block = slab.make();
    ASSERT_NE(block, nullptr);
    ASSERT_EQ(block->size, 0u);
    ASSERT_EQ(block->state(), BlockState::unused);
    block->size = 1;
    ASSERT_TRUE(made.insert(block).second);
  }
  const Block* previous = nullptr;
  for (const Block* block : made) {
    if (previous != nullptr) {
      ASSERT_GE(reinterpret_cast<const char*>(block) - reinterpret_cast<const char*>(previous),
                static_cast<std::ptrdiff_t>(sizeof(Block)));
    }
    previous = block;
  }
}

TEST(Slab, ARecycledRecordComesAgainFresh) {
  Slab<Block>& slab = eternal<Slab<Block>>();
  Block* block = slab.make();
  block->size = 7;
  block->upper = block;
  slab.recycle(block);
  Block* again = slab.make();
  EXPECT_EQ(again, block);
  EXPECT_EQ(again->size, 0u);
  EXPECT_EQ(again->upper, nullptr);
}

TEST(Slab, ARecycledRecordKeepsItsState) {  // a racing free that still holds it must read "not live"
  Slab<Block>& slab = eternal<Slab<Block>>();
  Block* block = slab.make();
  ASSERT_NE(block, nullptr);
  block->set(BlockState::free);
  slab.recycle(block);
  EXPECT_EQ(block->state(), BlockState::free);
}

class SegmentTest : public testing::Test {
 protected:
  // A block in the program's hands at `address`.
  Block* enter(std::uint64_t address) {
    Block& block = blocks_.emplace_back();
    block.set(address, BlockState::live);
    EXPECT_TRUE(segment.enter(&block, leaves));
    return &block;
  }

  Segment segment;
  Leaves& leaves = eternal<Leaves>();

 private:
  std::deque<Block> blocks_;
};

TEST_F(SegmentTest, FindsOnlyTheStartOfWhatWasEntered) {
  ASSERT_TRUE(segment.open(nullptr, kBase, kSize));
  EXPECT_EQ(segment.block_at(kBase), nullptr);
  for (const std::uint64_t at : {kBase, kBase + kUnit, kBase + kSize - kUnit}) {
    Block* block = enter(at);
    EXPECT_EQ(segment.block_at(at), block);
    EXPECT_EQ(segment.block_at(at + 1), nullptr);
    EXPECT_EQ(segment.block_at(at + kUnit - 1), nullptr);
    EXPECT_EQ(segment.block_at(at - kUnit), nullptr);
    segment.leave(*block, leaves);
    EXPECT_EQ(segment.block_at(at), nullptr);
  }
  EXPECT_EQ(segment.block_at(kBase - kUnit), nullptr);
  EXPECT_EQ(segment.block_at(kBase + kSize), nullptr);
  EXPECT_EQ(segment.block_at(0), nullptr);
}

TEST_F(SegmentTest, ManyBlocksOfOnePageAreEachFoundAndTheLastToLeaveMakesItEmpty) {
  ASSERT_TRUE(segment.open(nullptr, kBase, kSize));
  std::vector<Block*> blocks;
  for (std::uint64_t i = 0; i < Leaf::kUnits; ++i) blocks.push_back(enter(kBase + i * kUnit));
  Block* next_page = enter(kBase + Leaf::kPage);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t j = 0; j < blocks.size(); ++j)
      ASSERT_EQ(segment.block_at(kBase + j * kUnit), j < i ? nullptr : blocks[j]) << i << ' ' << j;
    segment.leave(*blocks[i], leaves);
  }
  EXPECT_EQ(segment.block_at(kBase + Leaf::kPage), next_page);
  Block* alone = enter(kBase + 3 * kUnit);
  EXPECT_EQ(segment.block_at(kBase + 3 * kUnit), alone);
  EXPECT_EQ(segment.block_at(kBase), nullptr);
}

TEST_F(SegmentTest, AClosedOneFindsNothing) {
  ASSERT_TRUE(segment.open(nullptr, kBase, kSize));
  enter(kBase + kUnit);
  segment.close(leaves);
  EXPECT_EQ(segment.block_at(kBase + kUnit), nullptr);
}

TEST_F(SegmentTest, ARecycledRecordIsEmptyWhateverItHeld) {
  ASSERT_TRUE(segment.open(nullptr, kBase, 2 * kSize));
  enter(kBase);
  enter(kBase + kUnit);
  enter(kBase + 2 * kSize - kUnit);
  segment.close(leaves);
  for (const std::uint64_t size : {kSize, 2 * kSize, 8 * kSize}) {
    const std::uint64_t base = kBase + (size << 8);
    ASSERT_TRUE(segment.open(nullptr, base, size));
    EXPECT_EQ(segment.address(), base);
    EXPECT_EQ(segment.size(), size);
    for (std::uint64_t at = base; at < base + size; at += kUnit) ASSERT_EQ(segment.block_at(at), nullptr);
    EXPECT_EQ(segment.block_at(base + size), nullptr);
    Block* first = enter(base);
    Block* second = enter(base + kUnit);  // in a leaf that was another's
    EXPECT_EQ(segment.block_at(base), first);
    EXPECT_EQ(segment.block_at(base + kUnit), second);
    EXPECT_EQ(segment.block_at(base + 2 * kUnit), nullptr);
    segment.close(leaves);
  }
}

TEST_F(SegmentTest, NamesItsArena) {
  auto* const arena = reinterpret_cast<Arena*>(&segment);
  ASSERT_TRUE(segment.open(arena, kBase, kSize));
  EXPECT_EQ(segment.arena(), arena);
}

}  // namespace
}  // namespace cushion
