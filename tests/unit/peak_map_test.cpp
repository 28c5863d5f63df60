// Peak map: each byte of a segment lands in its cell, the largest segments have strips, and maps are drawn seldom.
#include "core/peak_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

constexpr std::uint64_t kCell = 1024;  // of one segment of 2 MiB

class PeakMapTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (IsSkipped()) return;
    core().shared.own_page.word = static_cast<std::uint32_t>(TrackLevel::on);
  }
  // What a report would say now; live: 0 where there is none.
  PeakMap::Map Read() {
    PeakMap::Map found{};
    peak_map->read(core().shared, Patience::some, [&](const PeakMap::Map& map) { found = map; });
    return found;
  }
  // What it would say if tracking were off: the last map drawn.
  PeakMap::Map Last() {
    core().shared.own_page.word = 0;
    const PeakMap::Map last = Read();
    core().shared.own_page.word = static_cast<std::uint32_t>(TrackLevel::on);
    return last;
  }
  // A point of the time line, once the last map's rest is surely over. Answers the live bytes of the last map then.
  std::uint64_t Update() {
    std::this_thread::sleep_until(rested);
    const auto begun = std::chrono::steady_clock::now();
    peak_map->update(core().shared);
    const auto done = std::chrono::steady_clock::now();
    rested = done + 50 * (done - begun);
    return Last().live;
  }
  static std::string Cells(const PeakMap::Map& map, std::size_t i) {
    std::string cells;
    for (std::size_t c = 0; c < map.cells(map.strips[i]); ++c) cells += map.digit(map.strips[i], c);
    return cells;
  }
  static std::size_t AllCells(const PeakMap::Map& map) {
    std::size_t cells = 0;
    for (std::size_t i = 0; i < map.size; ++i) cells += map.cells(map.strips[i]);
    return cells;
  }

  std::unique_ptr<PeakMap> peak_map = std::make_unique<PeakMap>();
  std::chrono::steady_clock::time_point rested{};
};

TEST_F(PeakMapTest, WithoutMemoryThereIsNone) {
  EXPECT_EQ(Read().size, 0u);
  EXPECT_NE(core().Malloc(1), 0u);
  core().shared.own_page.word = 0;
  EXPECT_EQ(Read().size, 0u) << "drawn while tracking is off";
}

TEST_F(PeakMapTest, EveryBlockIsInItsCells) {
  std::vector<CUdeviceptr> blocks;
  for (const std::uint64_t bytes : {1024u, 300u, 4096u, 512u, 70'000u, 512u}) blocks.push_back(core().Malloc(bytes));
  for (std::size_t i = 1; i < blocks.size(); ++i) ASSERT_GT(blocks[i], blocks[i - 1]) << "of one segment, upwards";
  CHECK_CU(0, core().Free(blocks[2]));
  const PeakMap::Map map = Read();
  ASSERT_EQ(map.size, 1u);
  EXPECT_EQ(map.cell, kCell);
  EXPECT_EQ(map.live, 1024u + 300 + 512 + 70'000 + 512);
  EXPECT_EQ(map.left_out, 0u);
  const PeakMap::Strip& strip = map.strips[0];
  EXPECT_EQ(strip.device, 0);
  EXPECT_EQ(strip.address, blocks[0]);
  EXPECT_EQ(strip.size, kSegment);
  EXPECT_EQ(strip.used, 1024u + 512 + 512 + 70'144 + 512);
  // 9: whole; 4: half of a cell. 4 KiB were freed; two blocks share the last cell.
  const std::string expected =
      "94"
      "000"
      "4" +
      std::string(68 + 1, '9');
  const std::string cells = Cells(map, 0);
  EXPECT_EQ(cells.size(), kSegment / kCell);
  EXPECT_EQ(cells.substr(0, expected.size()), expected);
  EXPECT_EQ(cells.substr(expected.size()), std::string(cells.size() - expected.size(), '0'));
  EXPECT_EQ(strip.largest_free_run, strip.address + strip.size - (blocks[5] + 512));
}

TEST_F(PeakMapTest, ADigitIsTheEighthsBegun) {
  auto map = std::make_unique<PeakMap::Map>();
  map->cell = 16'384;
  PeakMap::Strip strip;
  strip.size = 16'384 + 512;
  ASSERT_EQ(map->cells(strip), 2u);
  std::string found;
  for (std::uint64_t used : {0u, 512u, 2'048u, 2'560u, 8'192u, 8'704u, 14'336u, 14'848u, 15'872u, 16'384u}) {
    map->used[0] = used;
    found += map->digit(strip, 0);
  }
  EXPECT_EQ(found, "0112457889");
  map->used[1] = 512;  // the last cell, cut off
  EXPECT_EQ(map->digit(strip, 1), '9');
}

TEST_F(PeakMapTest, ABlockOverPagesAndSegmentsInTheOrderOfTheirAddresses) {
  std::vector<CUdeviceptr> blocks;
  for (const std::uint64_t size : {7 * kMiB, 3 * kMiB, 5 * kMiB}) blocks.push_back(core().Malloc(size));
  std::ranges::sort(blocks);
  const PeakMap::Map map = Read();
  ASSERT_EQ(map.size, 3u);
  std::uint64_t used = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(map.strips[i].address, blocks[i]);
    EXPECT_EQ(map.strips[i].largest_free_run, kMiB);  // segments are of 2 MiB pages
    used += map.strips[i].used;
    const std::string cells = Cells(map, i);
    const std::size_t idle = kMiB / map.cell;
    EXPECT_EQ(cells, std::string(cells.size() - idle, '9') + std::string(idle, '0'));
  }
  EXPECT_EQ(used, 15 * kMiB);
}

TEST_F(PeakMapTest, OfTooManySegmentsTheLargestAreKept) {
  std::vector<CUdeviceptr> large;
  for (int i = 0; i < 300; ++i) {
    ASSERT_NE(core().Malloc(kSegment), 0u);
    if (i % 100 == 0) large.push_back(core().Malloc(2 * kSegment));
  }
  const PeakMap::Map map = Read();
  EXPECT_EQ(map.size, PeakMap::kStrips);
  EXPECT_EQ(map.left_out, 303 - PeakMap::kStrips);
  EXPECT_LE(AllCells(map), PeakMap::kCells);
  EXPECT_GE(AllCells(map), PeakMap::kCells / 4);
  const auto end = map.strips.begin() + PeakMap::kStrips;
  EXPECT_TRUE(std::is_sorted(map.strips.begin(), end, [](auto& a, auto& b) { return a.address < b.address; }));
  for (const CUdeviceptr p : large)
    EXPECT_TRUE(std::any_of(map.strips.begin(), end, [&](auto& s) { return s.address == p; }));
  for (std::size_t i = 0; i < map.size; ++i) EXPECT_EQ(Cells(map, i), std::string(map.cells(map.strips[i]), '9'));
}

TEST_F(PeakMapTest, WhatAMagazineHasIsFree) {
  core().options().magazine_size.bytes = 64 * kMiB;
  const CUdeviceptr freed = core().Malloc(kMiB);
  ASSERT_NE(core().Malloc(kMiB / 2), 0u);
  CHECK_CU(0, core().Free(freed));
  const PeakMap::Map map = Read();
  ASSERT_EQ(map.size, 1u);
  EXPECT_EQ(map.strips[0].used, kMiB / 2);
}

TEST_F(PeakMapTest, OfAnArenasSuperblockTheBlocksCount) {
  core().options().allocator = AllocatorKind::arena;
  core().options().superblock_size.bytes = 4 * kMiB;
  core().options().segment_size.bytes = 16 * kMiB;
  core().options().growth_max.bytes = 16 * kMiB;
  TestStream s;
  const std::vector<CUdeviceptr> blocks{core().Malloc(kMiB), core().MallocAsync(kMiB / 2, s)};
  const PeakMap::Map map = Read();
  ASSERT_EQ(map.size, 1u);  // superblocks are no segments
  EXPECT_EQ(map.strips[0].size, 16 * kMiB);
  EXPECT_EQ(map.strips[0].used, kMiB + kMiB / 2);
  std::string expected(map.cells(map.strips[0]), '0');
  const auto fill = [&](CUdeviceptr p, std::uint64_t bytes) {
    expected.replace((p - map.strips[0].address) / map.cell, bytes / map.cell, bytes / map.cell, '9');
  };
  fill(blocks[0], kMiB);
  fill(blocks[1], kMiB / 2);
  EXPECT_EQ(Cells(map, 0), expected);
}

TEST_F(PeakMapTest, TheNextIsDrawnWhenATenthMoreIsLive) {
  EXPECT_EQ(Update(), 0u);
  std::vector<CUdeviceptr> blocks{core().Malloc(kMiB - 512)};
  EXPECT_EQ(Update(), 0u) << "below the least";
  blocks.push_back(core().Malloc(19 * kMiB + 512));
  EXPECT_EQ(Update(), 20 * kMiB);
  blocks.push_back(core().Malloc(2 * kMiB - 512));
  EXPECT_EQ(Update(), 20 * kMiB) << "less than a tenth more";
  EXPECT_EQ(Read().live, 22 * kMiB - 512) << "a report draws one as soon as anything more is live";
  EXPECT_EQ(Update(), 22 * kMiB - 512);
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().Free(p));
  EXPECT_EQ(Update(), 22 * kMiB - 512);
  EXPECT_EQ(Read().live, 22 * kMiB - 512) << "less is live: the last one stays";
}

TEST_F(PeakMapTest, AMapTakesAFiftiethOfTheTime) {
  for (int i = 0; i < 20'000; ++i) ASSERT_NE(core().Malloc(512), 0u);
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_NE(Update(), 0u);
  const auto taken = std::chrono::steady_clock::now() - begun;
  const std::uint64_t last = Last().live;
  ASSERT_NE(core().Malloc(8 * kMiB), 0u);
  peak_map->update(core().shared);
  if (std::chrono::steady_clock::now() - begun < 2 * taken) {
    EXPECT_EQ(Last().live, last) << "drawn at once again";
  }
  std::this_thread::sleep_until(rested);
  peak_map->update(core().shared);
  EXPECT_EQ(Last().live, last + 8 * kMiB);
}

TEST_F(PeakMapTest, ALockThatCannotBeHadSpoilsNothing) {
  ASSERT_NE(core().Malloc(2 * kMiB), 0u);
  ASSERT_EQ(Read().live, 2 * kMiB);
  const CUdeviceptr p = core().Malloc(2 * kMiB);
  const std::lock_guard held(core().shared.map.find(p)->arena()->mutex);
  std::uint64_t live = 0;
  peak_map->read(core().shared, Patience::none, [&](const PeakMap::Map& map) { live = map.live; });
  EXPECT_EQ(live, 2 * kMiB);
}

// Maps are drawn while threads allocate, free and give superblocks back: every figure stays within its segment.
TEST_F(PeakMapTest, BesideThreadsThatAllocate) {
  core().options().allocator = AllocatorKind::arena;
  core().options().superblock_size.bytes = 2 * kMiB;
  core().options().magazine_size.bytes = 4 * kMiB;
  core().context();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::vector<CUdeviceptr> blocks(64);
      unsigned random = seed;
      while (!stop) {
        random = random * 1'664'525 + 1'013'904'223;
        CUdeviceptr& block = blocks[random >> 26];
        if (block != 0) {
          CHECK_CU(0, core().Free(block));
        }
        block = random % 3 == 0 ? 0 : core().Malloc(1 + random % (random % 5 == 0 ? 3 * kMiB : 20'000));
      }
      for (const CUdeviceptr p : blocks) {
        if (p != 0) {
          CHECK_CU(0, core().Free(p));
        }
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    peak_map = std::make_unique<PeakMap>();  // so that it draws
    const PeakMap::Map map = Read();
    for (std::size_t s = 0; s < map.size; ++s) {
      const PeakMap::Strip& strip = map.strips[s];
      ASSERT_LE(strip.used + strip.largest_free_run, strip.size);
      std::uint64_t used = 0;
      for (std::size_t c = 0; c < map.cells(strip); ++c) {
        ASSERT_LE(map.used[strip.first + c], map.cell);
        used += map.used[strip.first + c];
      }
      ASSERT_EQ(used, strip.used);
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cushion
