// Pool: bytes are never in two hands, neighbours merge at once, stamps never get younger.
#include "core/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "core/lane.h"
#include "tests/unit/eternal.h"

namespace cushion {
namespace {

constexpr std::uint64_t kPage = AddressMap::kPage;
constexpr std::uint64_t kBase = std::uint64_t{0x7f00} << 32;

std::uint64_t at(const Block* block) { return block->address(); }

class PoolTest : public testing::Test {
 protected:
  void SetUp() override {
    clean = pool.make_heap(Order::clean);
    other = pool.make_heap(Order::stream);
  }
  void TearDown() override { EXPECT_TRUE(pool.valid()); }

  Block* take(Heap* heap, std::uint64_t size, std::uint64_t alignment = kUnit) {
    return pool.take(*heap, size, alignment, kAnyStamp);
  }

  AddressMap& map = eternal<AddressMap>();
  Pool& pool = eternal<Pool>(map, nullptr);
  Heap* clean = nullptr;
  Heap* other = nullptr;
};

TEST_F(PoolTest, AnAddedSegmentIsOneFreeBlock) {
  ASSERT_TRUE(pool.add(kBase, 2 * kPage, *clean));
  EXPECT_EQ(pool.held(), 2 * kPage);
  EXPECT_EQ(pool.free_bytes(), 2 * kPage);
  EXPECT_EQ(pool.unused(), 2 * kPage);
  EXPECT_EQ(pool.fragments().largest, 2 * kPage);
  EXPECT_EQ(map.find(kBase + 2 * kPage - 1), pool.segments());
  EXPECT_EQ(map.find(kBase + 2 * kPage), nullptr);
}

TEST_F(PoolTest, ATakenBlockIsFoundByItsAddressAlone) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* block = take(clean, 4 * kUnit);
  ASSERT_NE(block, nullptr);
  const Segment* segment = map.find(at(block));
  EXPECT_EQ(segment->block_at(at(block)), block);
  EXPECT_EQ(segment->block_at(at(block) + kUnit), nullptr);
  EXPECT_EQ(segment->block_at(at(block) + 1), nullptr);
  const std::uint64_t address = at(block);
  pool.give(block, *clean, 1);
  EXPECT_EQ(segment->block_at(address), nullptr);
}

TEST_F(PoolTest, TheSameSizeComesBackAtTheSameAddress) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  for (std::uint64_t size = kUnit; size <= kPage; size *= 2) {
    Block* before = take(clean, 3 * kUnit);  // so that it is not the segment's head
    Block* block = take(clean, size - (size == kPage ? 3 * kUnit : 0));
    ASSERT_NE(block, nullptr);
    const std::uint64_t address = at(block);
    const std::uint64_t had = block->size;
    pool.give(block, *clean, 0);
    block = take(clean, had);
    EXPECT_EQ(at(block), address);
    pool.give(block, *clean, 0);
    pool.give(before, *clean, 0);
  }
}

TEST_F(PoolTest, AHoleOfTheExactSizeIsPreferred) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* hole = take(clean, 70 * kUnit);
  Block* wall = take(clean, kUnit);
  Block* larger = take(clean, 71 * kUnit);  // the same bin as 70 units
  Block* end = take(clean, kUnit);
  const std::uint64_t exact = at(hole);
  pool.give(hole, *clean, 1);
  pool.give(larger, *clean, 2);
  EXPECT_EQ(at(take(clean, 70 * kUnit)), exact);
  pool.give(wall, *clean, 3);
  pool.give(end, *clean, 3);
}

TEST_F(PoolTest, NeighboursOfOneHeapMergeAtOnceAndKeepTheLaterStamp) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* a = take(clean, kUnit);
  Block* b = take(clean, kUnit);
  Block* c = take(clean, kUnit);
  Block* d = take(clean, kPage - 3 * kUnit);
  pool.give(a, *other, 7);
  pool.give(c, *other, 3);
  pool.give(b, *other, 5);
  EXPECT_TRUE(pool.valid());
  EXPECT_EQ(pool.fragments().largest, 3 * kUnit);
  EXPECT_EQ(pool.take(*other, kUnit, kUnit, 6), nullptr);
  Block* all = pool.take(*other, 3 * kUnit, kUnit, 7);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(at(all), kBase);
  pool.give(all, *clean, 8);
  pool.give(d, *clean, 8);
  EXPECT_EQ(pool.unused(), kPage);
}

TEST_F(PoolTest, NeighboursOfTwoHeapsStayApart) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* a = take(clean, kUnit);
  pool.give(a, *other, 9);
  EXPECT_TRUE(pool.valid());
  EXPECT_EQ(pool.unused(), 0u);
  EXPECT_EQ(pool.fragments().largest, kPage - kUnit);
  EXPECT_EQ(take(other, 2 * kUnit), nullptr);
  pool.move(map.find(kBase)->first, *clean);
  EXPECT_EQ(pool.unused(), kPage);
  EXPECT_EQ(pool.fragments().largest, kPage);
}

TEST_F(PoolTest, WhatIsCutOffKeepsItsHeapAndStamp) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* whole = take(clean, kPage);
  pool.give(whole, *other, 4);
  Block* part = pool.take(*other, kUnit, kUnit, 4);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(pool.take(*other, kUnit, kUnit, 3), nullptr);
  EXPECT_EQ(take(clean, kUnit), nullptr);
  EXPECT_NE(pool.take(*other, kPage - kUnit, kUnit, 4), nullptr);
}

TEST_F(PoolTest, BigBlocksAreAlignedAndWhatIsSkippedServesOthers) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* small = take(clean, kUnit);
  Block* big = take(clean, kPage / 2, kBigAlignment);
  ASSERT_NE(big, nullptr);
  EXPECT_EQ(at(big) % kBigAlignment, 0u);
  Block* lead = take(clean, kBigAlignment - kUnit);
  ASSERT_NE(lead, nullptr);
  EXPECT_EQ(at(lead), at(small) + kUnit);
  EXPECT_TRUE(pool.valid());
}

TEST_F(PoolTest, AnEventedBlockIsFreeButInNobodysReach) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* block = take(clean, kPage);
  pool.give_evented(block, *other, 2);
  EXPECT_TRUE(pool.valid());
  EXPECT_EQ(pool.free_bytes(), kPage);
  EXPECT_EQ(pool.unused(), 0u);
  EXPECT_EQ(Pool::wholly_free(*pool.segments()), nullptr);
  EXPECT_EQ(take(other, kUnit), nullptr);
  EXPECT_FALSE(block->change(kBase, BlockState::live, BlockState::freeing));

  pool.take_evented(block);
  EXPECT_TRUE(pool.valid());
  EXPECT_EQ(pool.free_bytes(), 0u);
  EXPECT_EQ(map.find(kBase)->block_at(kBase), block);

  pool.give_evented(block, *other, 3);
  pool.settle_evented(block, *clean);
  EXPECT_EQ(pool.unused(), kPage);
  EXPECT_EQ(pool.take(*clean, kUnit, kUnit, 2), nullptr);
  EXPECT_NE(pool.take(*clean, kUnit, kUnit, 3), nullptr);
}

TEST_F(PoolTest, TrimGivesTheTailBack) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* block = take(clean, kPage);
  pool.trim(block, 5 * kUnit, *other, 6);
  EXPECT_EQ(block->size, 5 * kUnit);
  EXPECT_TRUE(pool.valid());
  EXPECT_EQ(pool.take(*other, kUnit, kUnit, 5), nullptr);
  Block* tail = pool.take(*other, kPage - 5 * kUnit, kUnit, 6);
  ASSERT_NE(tail, nullptr);
  EXPECT_EQ(at(tail), kBase + 5 * kUnit);
  pool.trim(block, 5 * kUnit, *other, 7);
  EXPECT_EQ(block->size, 5 * kUnit);
}

TEST_F(PoolTest, ARemovedSegmentLeavesTheMap) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  ASSERT_TRUE(pool.add(kBase + 8 * kPage, kPage, *clean));
  ASSERT_TRUE(pool.add(kBase + 16 * kPage, kPage, *clean));
  pool.remove(map.find(kBase + 8 * kPage));
  EXPECT_EQ(map.find(kBase + 8 * kPage), nullptr);
  EXPECT_EQ(pool.held(), 2 * kPage);
  EXPECT_TRUE(pool.valid());
  pool.remove(map.find(kBase + 16 * kPage));
  pool.remove(map.find(kBase));
  EXPECT_EQ(pool.segments(), nullptr);
  EXPECT_EQ(pool.held(), 0u);
  EXPECT_EQ(take(clean, kUnit), nullptr);
}

TEST_F(PoolTest, AbandonTakesOutEverythingWhateverIsLive) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  Block* live = take(clean, kUnit);
  pool.give_evented(take(clean, kUnit), *other, 1);
  pool.give(take(clean, kUnit), *other, 2);
  const Segment* segment = map.find(kBase);
  pool.abandon();
  EXPECT_EQ(pool.held(), 0u);
  EXPECT_EQ(pool.free_bytes(), 0u);
  EXPECT_EQ(pool.unused(), 0u);
  EXPECT_EQ(map.find(kBase), nullptr);
  EXPECT_EQ(segment->block_at(kBase), nullptr);
  EXPECT_NE(live->state(), BlockState::live);
  EXPECT_TRUE(pool.valid());

  clean = pool.make_heap(Order::clean);
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  EXPECT_EQ(at(take(clean, kPage)), kBase);
}

TEST_F(PoolTest, AHeapThatComesAgainIsAnother) {
  Heap* first = pool.make_heap(Order::stream);
  Gauges gauges;
  Lane lane{0, gauges};
  first->lane = &lane;
  first->newest = 9;
  pool.drop(first);
  Heap* second = pool.make_heap(Order::pending);
  EXPECT_EQ(second, first);
  EXPECT_EQ(second->order, Order::pending);
  EXPECT_EQ(second->newest, 0u);
  EXPECT_EQ(second->lane, nullptr);
  EXPECT_EQ(pool.heap(second->index), second);
}

TEST_F(PoolTest, LiveBlocksAreVisited) {
  ASSERT_TRUE(pool.add(kBase, kPage, *clean));
  ASSERT_TRUE(pool.add(kBase + 4 * kPage, kPage, *clean));
  for (const std::uint64_t size : {kUnit, kPage, 2 * kUnit}) take(clean, size)->live.requested = size - 1;
  take(clean, 3 * kUnit)->set(BlockState::cached);
  take(clean, 4 * kUnit)->api = Api::superblock;
  std::vector<std::uint64_t> seen;
  pool.for_each_live([&](const Pool::LiveBlock& block) {
    EXPECT_EQ(block.requested, block.size - 1);
    seen.push_back(block.size);
  });
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, (std::vector<std::uint64_t>{kUnit, 2 * kUnit, kPage}));
}

// The pool as a list of pieces by address, split and merged in the plainest way.
class Model {
 public:
  enum class Kind { live, free, evented };
  struct Piece {
    std::uint64_t size;
    Kind kind;
    std::uint32_t heap;
    std::uint64_t stamp;
    std::uint64_t segment;
  };

  void add(std::uint64_t address, std::uint64_t size, std::uint32_t heap) {
    segments[address] = size;
    pieces[address] = {size, Kind::free, heap, 0, address};
  }
  // Removes the segment if it is one free piece; whether it was.
  bool remove(std::uint64_t address) {
    const Piece& piece = pieces.at(address);
    if (piece.kind != Kind::free || piece.size != segments.at(address)) return false;
    pieces.erase(address);
    segments.erase(address);
    return true;
  }
  bool can_take(std::uint32_t heap, std::uint64_t size, std::uint64_t alignment, std::uint64_t stamp) const {
    return std::any_of(pieces.begin(), pieces.end(), [&](const auto& entry) {
      const auto& [address, p] = entry;
      return p.kind == Kind::free && p.heap == heap && p.stamp <= stamp &&
             round_up(address, alignment) + size <= address + p.size;
    });
  }
  // The pool chose `address`: whether that was its to choose.
  bool take(std::uint64_t address, std::uint32_t heap, std::uint64_t size, std::uint64_t alignment,
            std::uint64_t stamp) {
    const auto piece = std::prev(pieces.upper_bound(address));
    const auto [start, p] = *piece;
    if (p.kind != Kind::free || p.heap != heap || p.stamp > stamp || address != round_up(start, alignment) ||
        address + size > start + p.size) {
      return false;
    }
    pieces.erase(piece);
    if (address > start) pieces[start] = {address - start, Kind::free, heap, p.stamp, p.segment};
    pieces[address] = {size, Kind::live, 0, 0, p.segment};
    if (address + size < start + p.size) {
      pieces[address + size] = {start + p.size - address - size, Kind::free, heap, p.stamp, p.segment};
    }
    return true;
  }
  void give(std::uint64_t address, std::uint32_t heap, std::uint64_t stamp) {
    auto piece = pieces.find(address);
    piece->second.kind = Kind::free;
    piece->second.heap = heap;
    piece->second.stamp = stamp;
    const auto mergeable = [&](const Piece& p) {
      return p.kind == Kind::free && p.heap == heap && p.segment == piece->second.segment;
    };
    if (const auto next = std::next(piece); next != pieces.end() && mergeable(next->second)) {
      piece->second.size += next->second.size;
      piece->second.stamp = std::max(piece->second.stamp, next->second.stamp);
      pieces.erase(next);
    }
    if (piece != pieces.begin() && mergeable(std::prev(piece)->second)) {
      const auto previous = std::prev(piece);
      previous->second.size += piece->second.size;
      previous->second.stamp = std::max(previous->second.stamp, piece->second.stamp);
      pieces.erase(piece);
    }
  }
  void trim(std::uint64_t address, std::uint64_t size, std::uint32_t heap, std::uint64_t stamp) {
    Piece& piece = pieces.at(address);
    if (piece.size <= size) return;
    pieces[address + size] = {piece.size - size, Kind::live, 0, 0, piece.segment};
    piece.size = size;
    give(address + size, heap, stamp);
  }

  std::map<std::uint64_t, Piece> pieces;
  std::map<std::uint64_t, std::uint64_t> segments;
};

testing::AssertionResult same(const Pool& pool, const Model& model) {
  if (!pool.valid()) return testing::AssertionFailure() << "the pool is not valid";
  std::size_t pieces = 0;
  std::uint64_t held = 0;
  std::uint64_t idle = 0;
  for (const Segment* s = pool.segments(); s != nullptr; s = s->next) {
    held += s->size();
    for (const Block* b = s->first; b != nullptr; b = b->upper, ++pieces) {
      const auto found = model.pieces.find(at(b));
      if (found == model.pieces.end()) return testing::AssertionFailure() << "no piece begins at " << at(b);
      const Model::Piece& piece = found->second;
      const BlockState state = b->state();
      const auto kind = state == BlockState::live   ? Model::Kind::live
                        : state == BlockState::free ? Model::Kind::free
                                                    : Model::Kind::evented;
      if (piece.size != b->size || piece.kind != kind)
        return testing::AssertionFailure() << "size or state of the block at " << at(b);
      if (kind == Model::Kind::live) continue;
      idle += b->size;
      if (piece.heap != b->heap || piece.stamp != b->idle.stamp)
        return testing::AssertionFailure() << "heap or stamp of the block at " << at(b);
    }
  }
  if (pieces != model.pieces.size() || held != pool.held() || idle != pool.free_bytes())
    return testing::AssertionFailure() << "sums";
  return testing::AssertionSuccess();
}

class PoolModelTest : public PoolTest, public testing::WithParamInterface<unsigned> {};

// What a sanitizer looks for, fewer steps show; the values are the other builds' matter.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSteps = 1'500;
#else
constexpr int kSteps = 6'000;
#endif

TEST_P(PoolModelTest, AgreesAtEveryStep) {
  std::mt19937_64 random(GetParam());
  const auto below = [&](std::uint64_t n) { return random() % n; };
  std::vector<Heap*> heaps{clean, other, pool.make_heap(Order::pending), pool.make_heap(Order::stream)};
  Model model;
  std::vector<Block*> live;
  std::vector<Block*> evented;
  std::uint64_t stamp = 0;

  const auto pick = [&](std::vector<Block*>& from) {
    std::swap(from[below(from.size())], from.back());
    Block* block = from.back();
    from.pop_back();
    return block;
  };

  for (int step = 0; step < kSteps; ++step) {
    Heap* heap = heaps[below(heaps.size())];
    switch (below(12)) {
      case 0: {  // segments that touch each other must not merge
        const std::uint64_t address = kBase + below(24) * 2 * kPage;
        const std::uint64_t size = (1 + below(2)) * kPage;
        if (model.segments.size() >= 10 || map.find(address) != nullptr) break;
        ASSERT_TRUE(pool.add(address, size, *heap));
        model.add(address, size, heap->index);
        break;
      }
      case 1: {
        if (model.segments.empty() || below(4) != 0) break;
        const auto segment = std::next(model.segments.begin(), static_cast<long>(below(model.segments.size())));
        const std::uint64_t address = segment->first;
        const bool whole = Pool::wholly_free(*map.find(address)) != nullptr;
        ASSERT_EQ(model.remove(address), whole);
        if (whole) pool.remove(map.find(address));
        break;
      }
      case 2:
      case 3:
      case 4:
      case 5: {
        const std::uint64_t size = (1 + below(below(4) == 0 ? 4096 : 64)) * kUnit;
        const std::uint64_t alignment = below(3) == 0 ? kBigAlignment : kUnit;
        const std::uint64_t limit = below(3) == 0 ? below(stamp + 1) : kAnyStamp;
        const bool possible = model.can_take(heap->index, size, alignment, limit);
        Block* block = pool.take(*heap, size, alignment, limit);
        ASSERT_EQ(block != nullptr, possible);
        if (block == nullptr) break;
        ASSERT_EQ(block->size, size);
        ASSERT_TRUE(model.take(at(block), heap->index, size, alignment, limit)) << at(block);
        live.push_back(block);
        break;
      }
      case 6:
      case 7:
      case 8: {
        if (live.empty()) break;
        Block* block = pick(live);
        model.give(at(block), heap->index, ++stamp);
        pool.give(block, *heap, stamp);
        break;
      }
      case 9: {
        if (live.empty()) break;
        Block* block = pick(live);
        Model::Piece& piece = model.pieces.at(at(block));
        piece = {piece.size, Model::Kind::evented, heap->index, ++stamp, piece.segment};
        pool.give_evented(block, *heap, stamp);
        evented.push_back(block);
        break;
      }
      case 10: {
        if (evented.empty()) break;
        Block* block = pick(evented);
        Model::Piece& piece = model.pieces.at(at(block));
        if (below(2) == 0) {
          piece.kind = Model::Kind::live;
          pool.take_evented(block);
          live.push_back(block);
          const std::uint64_t size = (1 + below(block->size / kUnit)) * kUnit;
          model.trim(at(block), size, heap->index, ++stamp);
          pool.trim(block, size, *heap, stamp);
        } else {
          model.give(at(block), heap->index, piece.stamp);
          pool.settle_evented(block, *heap);
        }
        break;
      }
      default: {  // a heap's blocks up to a stamp move to another heap, as when they are known clean
        Heap* to = heaps[below(heaps.size())];
        if (to == heap || below(4) != 0) break;
        const std::uint64_t through = below(stamp + 1);
        std::vector<std::uint64_t> moved;
        for (const auto& [address, p] : model.pieces) {
          if (p.kind == Model::Kind::free && p.heap == heap->index && p.stamp <= through) moved.push_back(address);
        }
        for (const std::uint64_t address : moved) model.give(address, to->index, model.pieces.at(address).stamp);
        heap->bins.for_each([&](Block* block) {
          if (block->idle.stamp <= through) pool.move(block, *to);
        });
      }
    }
    ASSERT_TRUE(same(pool, model)) << "after step " << step;
  }
  pool.abandon();
  EXPECT_TRUE(same(pool, Model{}));
}

INSTANTIATE_TEST_SUITE_P(Seeds, PoolModelTest, testing::Range(1u, 9u));

}  // namespace
}  // namespace cushion
