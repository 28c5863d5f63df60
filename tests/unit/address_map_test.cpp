// Address map: a page belongs to the segment that was set for it, at every address up to 57 bits, under any readers.
#include "core/address_map.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/segment.h"
#include "tests/unit/eternal.h"

namespace cushion {
namespace {

constexpr std::uint64_t kPage = AddressMap::kPage;
constexpr std::uint64_t kEnd = std::uint64_t{1} << 57;

class AddressMapTest : public testing::Test {
 protected:
  AddressMap& map = eternal<AddressMap>();
  Segment segment;
};

TEST_F(AddressMapTest, AnEmptyMapKnowsNoAddress) {
  for (const std::uint64_t address : {std::uint64_t{0}, kPage, kEnd - 1, kEnd, ~std::uint64_t{0}}) {
    EXPECT_EQ(map.find(address), nullptr) << address;
  }
}

TEST_F(AddressMapTest, ARangeBeginsAndEndsExactly) {
  const std::uint64_t start = 0x7f12'3440'0000;
  ASSERT_TRUE(map.set(start, 3 * kPage, &segment));
  EXPECT_EQ(map.find(start - 1), nullptr);
  EXPECT_EQ(map.find(start), &segment);
  EXPECT_EQ(map.find(start + kPage), &segment);
  EXPECT_EQ(map.find(start + 3 * kPage - 1), &segment);
  EXPECT_EQ(map.find(start + 3 * kPage), nullptr);
  map.clear(start, 3 * kPage);
  EXPECT_EQ(map.find(start + kPage), nullptr);
}

TEST_F(AddressMapTest, ARangeMayCrossLeavesAndMiddles) {
  const std::uint64_t leaf = kPage << 12;
  const std::uint64_t middle = leaf << 12;
  for (const std::uint64_t boundary : {5 * leaf, 3 * middle}) {
    ASSERT_TRUE(map.set(boundary - kPage, 2 * kPage, &segment));
    EXPECT_EQ(map.find(boundary - kPage - 1), nullptr);
    EXPECT_EQ(map.find(boundary - 1), &segment);
    EXPECT_EQ(map.find(boundary), &segment);
    EXPECT_EQ(map.find(boundary + kPage), nullptr);
  }
}

TEST_F(AddressMapTest, FiftySevenBitsAreCoveredAndNoMore) {
  ASSERT_TRUE(map.set(kEnd - kPage, kPage, &segment));
  EXPECT_EQ(map.find(kEnd - 1), &segment);
  EXPECT_EQ(map.find(kEnd), nullptr);
  // The same low bits above the end are another address.
  EXPECT_EQ(map.find(kEnd | (kEnd - kPage)), nullptr);
  EXPECT_FALSE(map.set(kEnd, kPage, &segment));
}

TEST_F(AddressMapTest, ARangeThatDoesNotFitIsNotMappedInPart) {
  EXPECT_FALSE(map.set(kEnd - 2 * kPage, 3 * kPage, &segment));
  EXPECT_EQ(map.find(kEnd - 2 * kPage), nullptr);
  EXPECT_EQ(map.find(kEnd - kPage), nullptr);
}

TEST_F(AddressMapTest, NeighboursAreTheirOwnSegments) {
  Segment second;
  ASSERT_TRUE(map.set(8 * kPage, kPage, &segment));
  ASSERT_TRUE(map.set(9 * kPage, kPage, &second));
  EXPECT_EQ(map.find(9 * kPage - 1), &segment);
  EXPECT_EQ(map.find(9 * kPage), &second);
}

// A reader that finds a segment sees its fields, whoever writes beside it.
TEST_F(AddressMapTest, ReadersRaceWithWriters) {
  constexpr int kWriters = 2;
  constexpr int kRounds = 3'000;
  const auto start_of = [](int writer, int i) {
    return (std::uint64_t{1} << 40) + static_cast<std::uint64_t>(i * kWriters + writer) * (kPage << 11);
  };
  std::atomic<int> writing{kWriters};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      std::vector<Segment> segments(8);
      for (int round = 0; round < kRounds; ++round) {
        const int i = round % 8;
        const std::uint64_t start = start_of(writer, i);
        Segment& mine = segments[static_cast<std::size_t>(i)];
        if (round >= 8) map.clear(start, kPage);
        ASSERT_TRUE(mine.open(nullptr, start, kPage));
        ASSERT_TRUE(map.set(start, kPage, &mine));
      }
      for (int i = 0; i < 8; ++i) map.clear(start_of(writer, i), kPage);
      writing.fetch_sub(1);
      while (writing.load() > -2) std::this_thread::yield();  // its segments outlive the readers
    });
  }
  std::atomic<std::uint64_t> found{0};
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&] {
      for (int i = 0; writing.load(std::memory_order_relaxed) > 0; i = (i + 1) % 8) {
        for (int writer = 0; writer < kWriters; ++writer) {
          const std::uint64_t address = start_of(writer, i);
          const Segment* s = map.find(address + kPage - 1);
          if (s == nullptr) continue;
          found.fetch_add(1, std::memory_order_relaxed);
          ASSERT_EQ(s->address(), address);
          ASSERT_EQ(s->block_at(address), nullptr);
        }
      }
      writing.fetch_sub(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(map.find(start_of(0, i)), nullptr);
}

}  // namespace
}  // namespace cushion
