// Segment and slab: records stay readable for ever, and a table finds only what begins exactly there.
#include "core/segment.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
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
    ASSERT_EQ(block->state.load(), BlockState::unused);
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
  block->state = BlockState::free;
  slab.recycle(block);
  EXPECT_EQ(block->state.load(), BlockState::free);
}

TEST(Segment, FindsOnlyTheStartOfWhatWasEntered) {
  Segment segment;
  Block block;
  ASSERT_TRUE(segment.open(nullptr, kBase, kSize));
  EXPECT_EQ(segment.block_at(kBase), nullptr);
  for (const std::uint64_t at : {kBase, kBase + kUnit, kBase + kSize - kUnit}) {
    segment.enter(at, &block);
    EXPECT_EQ(segment.block_at(at), &block);
    EXPECT_EQ(segment.block_at(at + 1), nullptr);
    EXPECT_EQ(segment.block_at(at + kUnit - 1), nullptr);
    EXPECT_EQ(segment.block_at(at - kUnit), nullptr);
    segment.enter(at, nullptr);
    EXPECT_EQ(segment.block_at(at), nullptr);
  }
  EXPECT_EQ(segment.block_at(kBase - kUnit), nullptr);
  EXPECT_EQ(segment.block_at(kBase + kSize), nullptr);
  EXPECT_EQ(segment.block_at(0), nullptr);
}

TEST(Segment, AClosedOneFindsNothing) {
  Segment segment;
  Block block;
  ASSERT_TRUE(segment.open(nullptr, kBase, kSize));
  segment.enter(kBase + kUnit, &block);
  segment.close();
  EXPECT_EQ(segment.block_at(kBase + kUnit), nullptr);
}

TEST(Segment, ARecycledRecordIsEmptyWhateverItHeld) {
  Segment segment;
  Block block;
  ASSERT_TRUE(segment.open(nullptr, kBase, 2 * kSize));
  segment.enter(kBase, &block);
  segment.enter(kBase + 2 * kSize - kUnit, &block);
  segment.close();
  for (const std::uint64_t size : {kSize, 2 * kSize, 8 * kSize}) {
    const std::uint64_t base = kBase + (size << 8);
    ASSERT_TRUE(segment.open(nullptr, base, size));
    EXPECT_EQ(segment.address(), base);
    EXPECT_EQ(segment.size(), size);
    for (std::uint64_t at = base; at < base + size; at += kUnit) ASSERT_EQ(segment.block_at(at), nullptr);
    EXPECT_EQ(segment.block_at(base + size), nullptr);
    segment.enter(base + size - kUnit, &block);
    EXPECT_EQ(segment.block_at(base + size - kUnit), &block);
    segment.close();
  }
}

TEST(Segment, NamesItsContext) {
  Segment segment;
  auto* const context = reinterpret_cast<Context*>(&segment);
  ASSERT_TRUE(segment.open(context, kBase, kSize));
  EXPECT_EQ(segment.context(), context);
}

}  // namespace
}  // namespace cushion
