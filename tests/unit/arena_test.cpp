// Arenas: which arena serves a request, superblocks that come and go with their order, and frees at a superblock's
// first byte.
#include "core/arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include "tests/harness/child.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

constexpr std::uint64_t kSuperblock = 4 * kMiB;
constexpr std::uint64_t kBlock = kMiB;  // four of them in a superblock

// What the arenas but the global one hold.
std::uint64_t held_by_arenas(Core& core) {
  std::uint64_t all = 0;
  std::uint64_t global = 0;
  bool first = true;
  core.context().inspect(Patience::some, [&](const Pool& pool) {
    all += pool.held();
    if (std::exchange(first, false)) global = pool.held();
  });
  return all - global;
}

CUresult free_anything(Core& core, CUdeviceptr p) {  // as Runtime does
  const Segment* segment = core.shared.map.find(p);
  if (segment == nullptr) return driver().MemFree(p);
  const Context::Found found = Context::find(*segment, p);
  return found.block == nullptr ? CUDA_ERROR_INVALID_VALUE : found.arena->context().free(found);
}

class ArenaTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (IsSkipped()) return;
    core().options().allocator = AllocatorKind::arena;
    core().options().superblock_size.bytes = kSuperblock;
  }
  std::uint64_t HeldByArenas() { return held_by_arenas(core()); }
  CUresult FreeAnything(CUdeviceptr p) { return free_anything(core(), p); }
  Arena* ArenaOf(CUdeviceptr p) { return core().shared.map.find(p)->arena(); }
  std::vector<CUdeviceptr> Blocks(int count) {
    std::vector<CUdeviceptr> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(core().Malloc(kBlock));
    return blocks;
  }
};

// ---- which arena serves ------------------------------------------------------------------------------------------

TEST_F(ArenaTest, StreamsAndThreadsShareNoSuperblock) {
  TestStream s;
  TestStream t;
  std::vector<CUdeviceptr> blocks{core().MallocAsync(1'000, s), core().MallocAsync(1'000, t)};
  for (int i = 0; i < 2; ++i) {
    std::thread([&] { blocks.push_back(core().Malloc(1'000)); }).join();
  }
  EXPECT_NE(ArenaOf(blocks[0]), ArenaOf(blocks[1]));
  EXPECT_NE(ArenaOf(blocks[2]), ArenaOf(blocks[3]));
  for (const CUdeviceptr p : blocks) EXPECT_NE(ArenaOf(p)->index(), 0);
  EXPECT_EQ(ArenaOf(core().MallocAsync(1'000, s)), ArenaOf(blocks[0]));
  EXPECT_EQ(ArenaOf(core().MallocAsync(1'000, t)), ArenaOf(blocks[1]));
}

TEST_F(ArenaTest, BlocksAboveHalfASuperblockComeFromTheGlobalArena) {
  EXPECT_EQ(ArenaOf(core().Malloc(kSuperblock / 2 + 1))->index(), 0);
  EXPECT_EQ(HeldByArenas(), 0u);
  EXPECT_NE(ArenaOf(core().Malloc(kSuperblock / 2))->index(), 0);
  EXPECT_EQ(HeldByArenas(), kSuperblock);
}

TEST_F(ArenaTest, WhereThereIsNoRoomForASuperblockTheGlobalArenaServes) {
  core().options().max_size = {kSuperblock / 2, -1};
  const CUdeviceptr p = core().Malloc(1'000);
  ASSERT_NE(p, 0u);
  EXPECT_EQ(ArenaOf(p)->index(), 0);
  EXPECT_LE(core().held(), kSuperblock / 2);
}

// ---- superblocks go back -----------------------------------------------------------------------------------------

TEST_F(ArenaTest, OfSuperblocksWhollyFreeOneIsKept) {
  const std::vector<CUdeviceptr> blocks = Blocks(12);
  EXPECT_EQ(HeldByArenas(), 3 * kSuperblock);
  for (std::size_t i = 0; i < 4; ++i) CHECK_CU(0, core().Free(blocks[i]));
  EXPECT_EQ(HeldByArenas(), 3 * kSuperblock);
  for (std::size_t i = 4; i < 8; ++i) CHECK_CU(0, core().Free(blocks[i]));
  EXPECT_EQ(HeldByArenas(), 2 * kSuperblock);
  for (std::size_t i = 8; i < 12; ++i) CHECK_CU(0, core().Free(blocks[i]));
  EXPECT_EQ(HeldByArenas(), kSuperblock);
  EXPECT_EQ(core().context().unused(), core().held());
  EXPECT_EQ(HeldByArenas(), 0u);
}

TEST_F(ArenaTest, ASuperblockWithALiveBlockStays) {
  const std::vector<CUdeviceptr> blocks = Blocks(8);
  for (const CUdeviceptr p : blocks) {
    if (p != blocks[5]) {
      CHECK_CU(0, core().Free(p));
    }
  }
  core().context().unused();
  EXPECT_EQ(HeldByArenas(), kSuperblock);
  CHECK_CU(0, core().Free(blocks[5]));
  core().context().unused();
  EXPECT_EQ(HeldByArenas(), 0u);
}

// A superblock freed by a busy stream is for that stream and those ordered after it, by way of the global arena too.
TEST_F(ArenaTest, AStreamsSuperblockKeepsItsOrder) {
  TestStream s;
  TestStream t;
  TestStream ordered;
  Gate gate;
  std::vector<CUdeviceptr> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(core().MallocAsync(kBlock, s));
  gate.Hold(s);
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().FreeAsync(p, s));
  core().context().unused();
  ASSERT_EQ(HeldByArenas(), 0u);
  const auto was_theirs = [&](CUdeviceptr p, std::uint64_t bytes) {
    return std::any_of(blocks.begin(), blocks.end(), [&](CUdeviceptr b) { return b < p + bytes && p < b + kBlock; });
  };
  EXPECT_FALSE(was_theirs(core().Malloc(kSuperblock), kSuperblock));
  EXPECT_FALSE(was_theirs(core().Malloc(kBlock), kBlock));
  EXPECT_FALSE(was_theirs(core().MallocAsync(kSuperblock, t), kSuperblock));
  EXPECT_FALSE(was_theirs(core().MallocAsync(kBlock, t), kBlock));
  const std::uint64_t grows = counters().grows;
  core().context().order_after(ordered.identity, core().context().position(s.identity.id));
  CUdeviceptr small = 0;  // in a superblock that takes on the order
  for (int i = 0; i < 4 && !was_theirs(small, kBlock); ++i) small = core().MallocAsync(kBlock, ordered);
  EXPECT_TRUE(was_theirs(small, kBlock));
  EXPECT_TRUE(was_theirs(core().MallocAsync(kSuperblock, s), kSuperblock));
  EXPECT_EQ(counters().grows, grows);
  // The rest of that superblock is not clean: another stream of the same arena must not have it.
  for (int i = 0; i < Lane::kArenas; ++i) {
    TestStream other;
    EXPECT_FALSE(was_theirs(core().MallocAsync(kBlock, other), kBlock));
  }
  EXPECT_TRUE(s.Busy());
}

TEST_F(ArenaTest, ADeferredSuperblockWaitsForAFence) {
  core().options().free = FreeMode::deferred;
  TestStream s;
  Gate gate;
  const std::vector<CUdeviceptr> blocks = Blocks(8);
  gate.Hold(s);
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().Free(p));
  core().context().unused();
  ASSERT_EQ(HeldByArenas(), 0u);
  const std::uint64_t held = core().held();
  ASSERT_NE(core().Malloc(kSuperblock), 0u);
  ASSERT_NE(core().MallocAsync(kSuperblock, s), 0u);
  EXPECT_EQ(core().held(), held + 2 * kSuperblock);
  gate.Open();
  s.Finish();
  ASSERT_NE(core().Malloc(kSuperblock), 0u);
  ASSERT_NE(core().MallocAsync(kSuperblock, s), 0u);
  EXPECT_EQ(core().held(), held + 2 * kSuperblock);
}

// ---- bins --------------------------------------------------------------------------------------------------------

class BinningTest : public ArenaTest {
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    if (IsSkipped()) return;
    core().options().allocator = AllocatorKind::binning;
    core().options().bin_min.bytes = 2'048;
    core().options().bin_max.bytes = kMiB;
  }
  std::uint64_t SizeOf(std::uint64_t bytes) {
    const std::uint64_t before = core().usage().handed_out.current();
    EXPECT_NE(core().Malloc(bytes), 0u);
    return core().usage().handed_out.current() - before;
  }
};

TEST_F(BinningTest, SizesArePowersOfTwoBetweenTheSmallestBinAndTheLargest) {
  for (const std::uint64_t bytes : {1u, 2'048u}) EXPECT_EQ(SizeOf(bytes), 2'048u);
  for (const std::uint64_t bytes : {2'049u, 4'095u, 4'096u, 70'000u, 600'000u, 1u << 20})
    EXPECT_EQ(SizeOf(bytes), std::bit_ceil(bytes)) << bytes;
}

TEST_F(BinningTest, AboveTheLargestBinThePoolServes) {
  for (const std::uint64_t bytes : {kMiB + 1, 3 * kMiB}) {
    EXPECT_EQ(SizeOf(bytes), round_up(bytes, kBigAlignment));
    EXPECT_EQ(ArenaOf(core().Malloc(bytes))->index(), 0);
  }
  EXPECT_EQ(HeldByArenas(), 0u);
}

TEST_F(BinningTest, ABinIsOneArenaForAllAndItsBlocksDoNotMixWithOthers) {
  TestStream s;
  std::vector<CUdeviceptr> blocks;
  for (const std::uint64_t bytes : {3'000u, 5'000u}) {
    blocks.push_back(core().Malloc(bytes));
    blocks.push_back(core().MallocAsync(bytes, s));
    std::thread([&] { blocks.push_back(core().Malloc(bytes)); }).join();
  }
  for (std::size_t i = 1; i < 3; ++i) EXPECT_EQ(ArenaOf(blocks[i]), ArenaOf(blocks[0]));
  for (std::size_t i = 4; i < 6; ++i) EXPECT_EQ(ArenaOf(blocks[i]), ArenaOf(blocks[3]));
  EXPECT_NE(ArenaOf(blocks[0]), ArenaOf(blocks[3]));
}

// ---- wrong frees at a superblock's first byte ----------------------------------------------------------------------

std::atomic<int> g_driver_frees{0};

class ArenaFreeTest : public ArenaTest, public testing::WithParamInterface<std::uint64_t> {  // magazine size
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    if (IsSkipped()) return;
    core().options().magazine_size.bytes = GetParam();
    g_driver_frees = 0;
    core().shared.driver.cuMemFree_v2 = [](CUdeviceptr p) {
      ++g_driver_frees;
      return driver().MemFree(p);
    };
  }
};

INSTANTIATE_TEST_SUITE_P(Magazines, ArenaFreeTest, testing::Values(0, 64 * kMiB),
                         [](const auto& named) { return named.param == 0 ? "without" : "with"; });

TEST_P(ArenaFreeTest, ASecondFreeIsAnInvalidValueWhereverTheSuperblockIs) {
  const CUdeviceptr head = core().Malloc(kBlock);
  ASSERT_EQ(head % AddressMap::kPage, 0u);
  const CUdeviceptr next = core().Malloc(kBlock);
  ASSERT_EQ(next, head + kBlock);
  CHECK_CU(1, FreeAnything(head + kUnit));
  CHECK_CU(0, FreeAnything(head));
  CHECK_CU(1, FreeAnything(head));  // in a magazine, or free in its arena, under a live block
  core().context().unused();
  CHECK_CU(1, FreeAnything(head));
  CHECK_CU(0, FreeAnything(next));
  CHECK_CU(1, FreeAnything(head));  // wholly free
  core().context().unused();
  ASSERT_EQ(HeldByArenas(), 0u);
  CHECK_CU(1, FreeAnything(head));  // in the global arena
  const CUdeviceptr big = core().Malloc(kSuperblock / 2 + 1);
  ASSERT_EQ(big, head);
  CHECK_CU(1, FreeAnything(big + kUnit));
  CHECK_CU(0, FreeAnything(big));
  CHECK_CU(1, FreeAnything(big));
  EXPECT_EQ(g_driver_frees, 0);
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().frees(), 3u);
}

TEST_P(ArenaFreeTest, ASuperblocksFirstByteIsNoBlockWhileItBelongsToAnArena) {
  const CUdeviceptr head = core().Malloc(kBlock);
  ASSERT_NE(core().Malloc(kBlock), 0u);
  CHECK_CU(0, FreeAnything(head));
  core().context().unused();
  // The superblock's own record is not to be had by its address, whichever table is asked.
  for (Segment* segment = core().shared.map.find(head); segment != nullptr; segment = segment->beneath) {
    Block* block = segment->block_at(head);
    if (block == nullptr) continue;
    CHECK_CU(1, core().FreeBlock(block, head));
  }
  EXPECT_EQ(g_driver_frees, 0);
}

// One thread frees the superblock's first byte again and again while it wanders between the arenas.
TEST_P(ArenaFreeTest, SecondFreesWhileSuperblocksWanderTakeNothing) {
  core().options().max_size = {kSuperblock, -1};
  const CUdeviceptr head = core().Malloc(kBlock);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> stolen{0};
  std::thread thief([&] {
    while (!stop) stolen += free_anything(core(), head) == CUDA_SUCCESS ? 1 : 0;
  });
  std::uint64_t own = 0;
  CUdeviceptr p = head;
  for (int i = 0; i < 3'000; ++i) {
    own += p != 0 && FreeAnything(p) == CUDA_SUCCESS ? 1 : 0;
    core().context().unused();
    p = core().Malloc(kBlock);
  }
  stop = true;
  thief.join();
  if (p != 0) own += FreeAnything(p) == CUDA_SUCCESS ? 1 : 0;
  EXPECT_EQ(own + stolen, core().served(Api::malloc));
  EXPECT_EQ(core().frees(), core().served(Api::malloc));
  EXPECT_EQ(core().usage().handed_out.current(), 0u);
  EXPECT_TRUE(core().valid());
  EXPECT_EQ(core().context().unused(), core().held());
  EXPECT_EQ(g_driver_frees, 0);
}

// ---- the host is out of memory -----------------------------------------------------------------------------------

// Lets the process map no more memory while it lives.
class NoMoreMappings {
 public:
  NoMoreMappings() {
    getrlimit(RLIMIT_AS, &before_);
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit now{pages * 4'096, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &now), 0);
  }
  ~NoMoreMappings() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

int HostOutOfMemory() {
  const harness::Gpu gpu;
  CHECK_CU(0, harness::LoadKernels());
  Core core;
  core.options().allocator = AllocatorKind::arena;
  core.options().superblock_size.bytes = kSuperblock;
  core.options().segment_size.bytes = 4 * kSuperblock;
  std::vector<CUdeviceptr> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(core.Malloc(kBlock));
  EXPECT_EQ(held_by_arenas(core), kSuperblock);
  {
    const NoMoreMappings none;
    blocks.push_back(core.Malloc(kBlock));  // a second superblock has no table: the global arena serves
  }
  EXPECT_NE(blocks.back(), 0u);
  EXPECT_EQ(core.shared.map.find(blocks.back())->arena()->index(), 0);
  EXPECT_EQ(held_by_arenas(core), kSuperblock);
  EXPECT_TRUE(core.valid());
  blocks.push_back(core.Malloc(kBlock));
  EXPECT_EQ(held_by_arenas(core), 2 * kSuperblock);
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core.Free(p));
  EXPECT_EQ(core.context().unused(), core.held());
  EXPECT_EQ(core.held(), 4 * kSuperblock);
  EXPECT_TRUE(core.valid());
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(ArenaHostMemory, ASuperblockWithoutATableGoesBackAndTheGlobalArenaServes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers map memory themselves";
#endif
  const harness::ChildResult result = harness::RunChild("host", HostOutOfMemory);
  EXPECT_EQ(result.status, 0) << result.output;
}

}  // namespace
}  // namespace cushion
