// Lanes and magazines over every allocator: what a lane caches keeps its order and serves others before the pool grows,
// one fence serves a batch, figures stay exact, and a reset leaves no block in two hands.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/lane.h"
#include "core/thread.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

constexpr std::uint64_t kBlock = kMiB / 2;
constexpr std::uint64_t kSuperblock = kSegment;  // four blocks

struct Taken {
  CUdeviceptr address;
  std::uint64_t bytes;

  bool Overlaps(const Taken& other) const {
    return address < other.address + other.bytes && other.address < address + bytes;
  }
};

bool any_overlaps(const std::vector<Taken>& all, const Taken& one) {
  return std::any_of(all.begin(), all.end(), [&](const Taken& t) { return t.Overlaps(one); });
}

class ContextLaneTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (IsSkipped()) return;
    core().options().magazine_size.bytes = 64 * kMiB;
    core().options().superblock_size.bytes = kSuperblock;
  }

  CUresult FreeAnything(CUdeviceptr p) {  // as Runtime does
    Segment* segment = core().shared.map.find(p);
    Block* block = segment == nullptr ? nullptr : segment->block_at(p);
    return block == nullptr ? CUDA_ERROR_INVALID_VALUE : core().FreeBlock(block, p);
  }
  int Lanes() {  // of streams, those that have ended too
    int lanes = 0;
    core().context().for_each_tally([&](const Tally&) { ++lanes; });
    return lanes - Context::kHostLanes;
  }

  // Blocks until the pool has grown twice: so all that may be handed out was, and what others cache was collected.
  std::vector<Taken> TakeUntilGrowth(const std::function<CUdeviceptr()>& allocate) {
    std::vector<Taken> taken;
    for (const std::uint64_t grows = counters().grows; counters().grows < grows + 2;) {
      taken.push_back({allocate(), kBlock});
      if (taken.back().address == 0) break;
    }
    return taken;
  }
  void ExpectNobodyElseHas(const std::vector<Taken>& freed) {
    TestStream other;
    for (const auto& allocate : {std::function{[&] { return core().Malloc(kBlock); }},
                                 std::function{[&] { return core().MallocAsync(kBlock, other); }}}) {
      for (const Taken& t : TakeUntilGrowth(allocate)) {
        ASSERT_NE(t.address, 0u);
        EXPECT_FALSE(any_overlaps(freed, t)) << "handed out while it may be in use";
        live_.push_back(t.address);
      }
    }
    core().context().stream_going(other.identity);
  }
  // Not one of them is stranded: with all else free, all serve cudaMalloc when the pool may not grow.
  void ExpectAllServe(const std::vector<Taken>& freed) {
    for (const CUdeviceptr p : live_) CHECK_CU(0, core().Free(p));
    live_.clear();
    core().options().max_size = {core().held(), -1};
    std::vector<Taken> taken;
    while (const CUdeviceptr p = core().Malloc(kBlock)) taken.push_back({p, kBlock});
    for (const Taken& f : freed) EXPECT_TRUE(any_overlaps(taken, f)) << "stranded";
  }

  std::vector<CUdeviceptr> live_;  // beside what a test has freed
};

// ---- under every allocator ---------------------------------------------------------------------------------------

class EveryAllocator : public ContextLaneTest, public testing::WithParamInterface<AllocatorKind> {
 protected:
  void SetUp() override {
    ContextLaneTest::SetUp();
    if (!IsSkipped()) core().options().allocator = GetParam();
  }
  std::vector<Taken> TakeThree(const TestStream& s) {
    std::vector<Taken> taken;
    for (int i = 0; i < 3; ++i) taken.push_back({core().MallocAsync(kBlock, s), kBlock});
    return taken;
  }
  void FreeAll(const std::vector<Taken>& taken, const TestStream& s) {
    for (const Taken& t : taken) CHECK_CU(0, core().FreeAsync(t.address, s));
  }
};

std::string NameOf(const testing::TestParamInfo<AllocatorKind>& info) {
  return info.param == AllocatorKind::pool ? "pool" : info.param == AllocatorKind::arena ? "arena" : "binning";
}

INSTANTIATE_TEST_SUITE_P(Allocators, EveryAllocator,
                         testing::Values(AllocatorKind::pool, AllocatorKind::arena, AllocatorKind::binning), NameOf);

TEST_P(EveryAllocator, AStreamHasItsCachedBlocksAtOnce) {
  TestStream s;
  Gate gate;
  gate.Hold(s);
  const std::vector<Taken> blocks = TakeThree(s);
  FreeAll(blocks, s);
  for (int i = 2; i >= 0; --i) EXPECT_EQ(core().MallocAsync(kBlock, s), blocks[static_cast<std::size_t>(i)].address);
  EXPECT_TRUE(s.Busy());
  EXPECT_EQ(counters().grows, 1u);
}

TEST_P(EveryAllocator, NobodyElseHasACachedBlockBeforeItsStreamIsThere) {
  TestStream s;
  Gate gate;
  const std::vector<Taken> blocks = TakeThree(s);
  gate.Hold(s);
  FreeAll(blocks, s);
  ExpectNobodyElseHas(blocks);
  EXPECT_TRUE(s.Busy());
  gate.Open();
  s.Finish();
  ExpectAllServe(blocks);
}

TEST_P(EveryAllocator, NorAfterTheStreamWasDestroyed) {
  TestStream s;
  Gate gate;
  const std::vector<Taken> blocks = TakeThree(s);
  gate.Hold(s);
  FreeAll(blocks, s);
  core().context().stream_going(s.identity);
  s.stream.Destroy();
  ExpectNobodyElseHas(blocks);
  gate.Open();
  Synchronize();
  ExpectAllServe(blocks);
}

TEST_P(EveryAllocator, NorAfterLanesWereTidied) {
  TestStream s;
  Gate gate;
  const std::vector<Taken> blocks = TakeThree(s);
  gate.Hold(s);
  FreeAll(blocks, s);
  TestStream others[100];
  for (const TestStream& other : others) live_.push_back(core().MallocAsync(1'000, other));
  core().context().relieve(0);
  EXPECT_LT(core().shared.stream_lanes, 64) << "nothing was tidied";
  ExpectNobodyElseHas(blocks);
  gate.Open();
  s.Finish();
  ExpectAllServe(blocks);
}

TEST_P(EveryAllocator, ACudaFreeOfAStreamsBlockWaitsInTheHostLaneForTheWholeContext) {
  TestStream s;
  TestStream busy;
  Gate gate;
  CHECK_CU(0, core().Free(core().Malloc(kBlock)));  // the thread's lane caches this class from now on
  const std::vector<Taken> blocks = TakeThree(s);
  gate.Hold(busy);
  for (const Taken& t : blocks) CHECK_CU(0, core().Free(t.address));
  EXPECT_TRUE(busy.Busy());
  ExpectNobodyElseHas(blocks);
  for (const Taken& t : TakeUntilGrowth([&] { return core().MallocAsync(kBlock, s); })) {
    EXPECT_FALSE(any_overlaps(blocks, t));
    live_.push_back(t.address);
  }
  gate.Open();
  busy.Finish();
  ExpectAllServe(blocks);
}

TEST_P(EveryAllocator, AStreamOrderedAfterTheFreesHasWhatAnotherCaches) {
  TestStream s;
  TestStream t;
  Gate gate;
  const std::vector<Taken> blocks = TakeThree(s);
  gate.Hold(s);
  FreeAll(blocks, s);
  core().context().order_after(t.identity, core().context().position(s.identity.id));
  core().options().max_size = {core().held(), -1};
  std::vector<Taken> taken;
  while (const CUdeviceptr p = core().MallocAsync(kBlock, t)) taken.push_back({p, kBlock});
  EXPECT_TRUE(s.Busy());
  EXPECT_EQ(counters().stream_waits, 0u);
  // An arena's blocks are for its own streams; what is in no superblock that another holds is for t.
  if (GetParam() != AllocatorKind::arena) {
    for (const Taken& b : blocks) EXPECT_TRUE(any_overlaps(taken, b));
  }
}

// ---- deferred: one fence for a batch -----------------------------------------------------------------------------

std::atomic<int> g_fences{0};

class EveryAllocatorDeferred : public EveryAllocator {
 protected:
  void SetUp() override {
    EveryAllocator::SetUp();
    if (IsSkipped()) return;
    core().options().free = FreeMode::deferred;
    g_fences = 0;
    core().shared.driver.cuCtxRecordEvent = [](CUcontext context, CUevent event) {
      ++g_fences;
      return driver().CtxRecordEvent(context, event);
    };
  }
};

INSTANTIATE_TEST_SUITE_P(Allocators, EveryAllocatorDeferred,
                         testing::Values(AllocatorKind::pool, AllocatorKind::arena, AllocatorKind::binning), NameOf);

TEST_P(EveryAllocatorDeferred, NobodyHasABlockBeforeAFenceCoversItsFree) {
  TestStream s;
  Gate gate;
  std::vector<Taken> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back({core().Malloc(kBlock), kBlock});
  gate.Hold(s);
  for (const Taken& t : blocks) CHECK_CU(0, core().Free(t.address));
  EXPECT_TRUE(s.Busy());
  ExpectNobodyElseHas(blocks);
  for (const Taken& t : TakeUntilGrowth([&] { return core().MallocAsync(kBlock, s); })) {
    EXPECT_FALSE(any_overlaps(blocks, t));
    live_.push_back(t.address);
  }
  gate.Open();
  s.Finish();
  ExpectAllServe(blocks);
}

TEST_P(EveryAllocatorDeferred, AFullBatchThatIsBusyIsNotHandedOut) {
  constexpr std::uint64_t kSmall = 1'024;
  TestStream s;
  Gate gate;
  std::set<CUdeviceptr> freed;
  for (unsigned i = 0; i < 2 * Magazine::kBatch; ++i) freed.insert(core().Malloc(kSmall));
  gate.Hold(s);
  for (const CUdeviceptr p : freed) CHECK_CU(0, core().Free(p));  // two batches, with a fence each
  for (unsigned i = 0; i < 2 * Magazine::kBatch; ++i) EXPECT_FALSE(freed.contains(core().Malloc(kSmall)));
  EXPECT_TRUE(s.Busy());
}

TEST_P(EveryAllocatorDeferred, OneFenceServesABatch) {
  constexpr int kPairs = 1'000;
  for (int i = 0; i < kPairs; ++i) {
    const CUdeviceptr p = core().Malloc(1'000);
    ASSERT_NE(p, 0u);
    CHECK_CU(0, core().Free(p));
  }
  EXPECT_GE(g_fences, kPairs / static_cast<int>(Magazine::kBatch));
  EXPECT_LE(g_fences, kPairs / static_cast<int>(Magazine::kBatch) + 1);  // and the first allocation's
  EXPECT_EQ(core().held(), kSegment);
}

TEST_P(EveryAllocatorDeferred, WhatIsFreedIsHadAgainBeforeThePoolGrows) {
  core().options().magazine_size.bytes = kMiB;
  std::mt19937 random(5);
  for (int i = 0; i < 5'000; ++i) {
    const CUdeviceptr p = core().Malloc(1 + random() % 200'000);
    ASSERT_NE(p, 0u);
    CHECK_CU(0, core().Free(p));
  }
  EXPECT_EQ(core().held(), kSegment);
}

// ---- nothing strands ---------------------------------------------------------------------------------------------

TEST_P(EveryAllocator, WhatOneThreadAllocatesAndAnotherFreesComesBack) {
  constexpr int kRounds = 200;
  core().context();
  std::vector<CUdeviceptr> batch;
  std::barrier turn(2);
  std::thread other([&] {
    CHECK_CU(0, core().Free(core().Malloc(kBlock / 8)));  // it caches this class, too
    for (int i = 0; i < kRounds; ++i) {
      turn.arrive_and_wait();
      for (const CUdeviceptr p : batch) CHECK_CU(0, core().Free(p));
      turn.arrive_and_wait();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    batch.clear();
    for (int n = 0; n < 16; ++n) batch.push_back(core().Malloc(kBlock / 8));
    EXPECT_EQ(std::count(batch.begin(), batch.end(), 0u), 0);
    turn.arrive_and_wait();
    turn.arrive_and_wait();
  }
  other.join();
  EXPECT_LE(core().usage().held.peak(), 2 * kSegment);  // an arena each
  EXPECT_EQ(core().context().unused(), core().held());
}

TEST_P(EveryAllocator, WhatAnIdleStreamCachesServesOthersBeforeThePoolGrows) {
  TestStream s;
  TestStream t;
  FreeAll(TakeThree(s), s);
  s.Finish();
  for (int i = 0; i < 3; ++i) ASSERT_NE(core().MallocAsync(kBlock, t), 0u);
  EXPECT_EQ(counters().grows, 1u);
}

TEST_P(EveryAllocator, WhatAnEndedThreadCachedServesOthersBeforeThePoolGrows) {
  core().context();
  std::thread([&] {
    std::vector<CUdeviceptr> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(core().Malloc(kBlock));
    for (const CUdeviceptr p : blocks) CHECK_CU(0, core().Free(p));
  }).join();
  TestStream s;
  for (int i = 0; i < 3; ++i) ASSERT_NE(core().MallocAsync(kBlock, s), 0u);
  EXPECT_EQ(counters().grows, 1u);
}

TEST_P(EveryAllocator, WhatIsCachedServesLargerRequestsBeforeTheyAreForwarded) {
  core().options().max_size = {2 * kSegment, -1};
  TestStream s;
  std::vector<Taken> blocks = TakeThree(s);
  FreeAll(blocks, s);
  s.Finish();
  std::vector<CUdeviceptr> small;
  for (int i = 0; i < 20; ++i) small.push_back(core().Malloc(50'000));
  for (const CUdeviceptr p : small) CHECK_CU(0, core().Free(p));
  EXPECT_NE(core().Malloc(kSegment), 0u);
  EXPECT_NE(core().Malloc(kSegment), 0u);
  EXPECT_LE(core().usage().held.peak(), 2 * kSegment);
}

TEST_P(EveryAllocator, WhatIsCachedCountsAsUnusedAndGoesBackWhenMemoryIsShort) {
  TestStream s;
  FreeAll(TakeThree(s), s);
  std::vector<CUdeviceptr> blocks;
  for (const std::uint64_t bytes : {std::uint64_t{1'000}, std::uint64_t{70'000}, kBlock, 3 * kSegment})
    blocks.push_back(core().Malloc(bytes));
  for (const CUdeviceptr p : blocks) CHECK_CU(0, core().Free(p));
  s.Finish();
  EXPECT_GT(core().held(), 3 * kSegment);
  EXPECT_EQ(core().context().unused(), core().held());
  EXPECT_NE(core().context().relieve(0), 0u);
  EXPECT_EQ(core().held(), 0u);
}

TEST_P(EveryAllocator, WhatIsCachedGoesBackAtTheProgramsSynchronize) {
  core().options().release_threshold = {0, -1};
  TestStream s;
  FreeAll(TakeThree(s), s);
  CHECK_CU(0, core().Free(core().Malloc(kBlock)));
  const std::uint64_t stamp = core().context().advance();
  const std::uint64_t generation = core().context().generation();
  Synchronize();
  core().context().synchronized(stamp, generation);
  EXPECT_EQ(core().held(), 0u);
}

// ---- figures -----------------------------------------------------------------------------------------------------

// One thread over both APIs: the figures follow a plain sum at every step.
TEST_P(EveryAllocator, FiguresOfOneThreadAreExact) {
  for (const bool pressed : {false, true}) {
    if (pressed) {
      core().refuse_growth();
      EXPECT_EQ(core().Malloc(2 * core().held()), 0u);  // refused: frees now carry an event
    }
    TestStream lanes[2];
    struct Live {
      CUdeviceptr address;
      std::uint64_t bytes;
    };
    std::vector<Live> live;
    std::mt19937 random(11);
    std::uint64_t current = core().usage().requested.current();
    std::uint64_t peak = core().usage().requested.peak();
    std::uint64_t host = core().served(Api::malloc);
    std::uint64_t async = core().served(Api::malloc_async);
    std::uint64_t frees = core().frees();
    EXPECT_EQ(current, 0u);
    for (int i = 0; i < 3'000; ++i) {
      const auto lane = static_cast<unsigned>(random() % 3);
      if (random() % 2 == 0) {
        const std::uint64_t bytes = 1 + random() % 20'000;
        const CUdeviceptr p = lane == 2 ? core().Malloc(bytes) : core().MallocAsync(bytes, lanes[lane]);
        if (p == 0) continue;
        ++(lane == 2 ? host : async);
        current += bytes;
        peak = std::max(peak, current);
        live.push_back({p, bytes});
      } else if (!live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        CHECK_CU(0, lane == 2 ? core().Free(live.back().address) : core().FreeAsync(live.back().address, lanes[lane]));
        ++frees;
        current -= live.back().bytes;
        live.pop_back();
      }
      ASSERT_EQ(core().usage().requested.current(), current) << i;
      ASSERT_EQ(core().usage().requested.peak(), peak) << i;
      ASSERT_EQ(core().frees(), frees);
    }
    EXPECT_EQ(core().served(Api::malloc), host);
    EXPECT_EQ(core().served(Api::malloc_async), async);
    for (const Live& l : live) CHECK_CU(0, core().Free(l.address));
    EXPECT_EQ(core().usage().handed_out.current(), 0u);
  }
}

TEST_P(EveryAllocator, SumsOfManyThreadsComeOutEvenAndNoBlockIsInTwoHands) {
  constexpr unsigned kThreads = 4;
  for (const FreeMode mode : {FreeMode::sync, FreeMode::deferred}) {
    core().options().free = mode;
    core().context();
    const std::uint64_t host = core().served(Api::malloc);
    const std::uint64_t async = core().served(Api::malloc_async);
    const std::uint64_t frees = core().frees();
    harness::SharedWord bad;
    std::atomic<std::uint64_t> mallocs{0};
    std::atomic<std::uint64_t> async_mallocs{0};
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= kThreads; ++seed) {
      threads.emplace_back([&, seed] {
        CHECK_CU(0, driver().CtxSetCurrent(core().context().handle()));
        {
          TestStream s;
          std::mt19937 random(seed);
          std::vector<CUdeviceptr> live;
          for (int i = 0; i < 300; ++i) {
            const bool host_ordered = random() % 2 == 0;
            if (random() % 2 == 0) {
              const std::uint64_t bytes = 4'096 + random() % 3 * 100'000;
              const CUdeviceptr p = host_ordered ? core().Malloc(bytes) : core().MallocAsync(bytes, s);
              ASSERT_NE(p, 0u);
              ++(host_ordered ? mallocs : async_mallocs);
              CHECK_CU(0, harness::LaunchFillHoldCheck(s, p, 4'096, seed, 10'000, bad.on_device()));
              live.push_back(p);
            } else if (!live.empty()) {
              CHECK_CU(0, host_ordered ? core().Free(live.back()) : core().FreeAsync(live.back(), s));
              live.pop_back();
            }
          }
          for (const CUdeviceptr p : live) CHECK_CU(0, core().FreeAsync(p, s));
          s.Finish();
          core().context().stream_going(s.identity);
        }
        CHECK_CU(0, driver().CtxSetCurrent(nullptr));
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(bad.Get(), 0u);
    EXPECT_EQ(core().served(Api::malloc) - host, mallocs);
    EXPECT_EQ(core().served(Api::malloc_async) - async, async_mallocs);
    EXPECT_EQ(core().frees() - frees, mallocs + async_mallocs);
    EXPECT_EQ(core().usage().requested.current(), 0u);
    EXPECT_EQ(core().usage().handed_out.current(), 0u);
    EXPECT_EQ(core().shared.stream_lanes, 0);
  }
}

// ---- wrong frees -------------------------------------------------------------------------------------------------

TEST_P(EveryAllocator, OfTwoFreesAtTheSameMomentExactlyOneSucceeds) {
  constexpr int kRounds = 500;
  std::atomic<CUdeviceptr> shared{0};
  std::atomic<int> succeeded{0};
  std::barrier moment(2);
  const auto race = [&](bool async) {
    TestStream s;
    for (int i = 0; i < kRounds; ++i) {
      moment.arrive_and_wait();
      const CUdeviceptr p = shared;
      Block* block = core().BlockAt(p);
      moment.arrive_and_wait();
      const CUresult result = async ? core().FreeBlockAsync(block, p, s, core().context()) : core().FreeBlock(block, p);
      if (result == CUDA_SUCCESS) {
        ++succeeded;
      } else {
        CHECK_CU(1, result);
      }
      moment.arrive_and_wait();
      if (async) continue;
      EXPECT_EQ(succeeded.exchange(0), 1);
      shared = core().Malloc(10'000);
    }
    s.Finish();
  };
  core().context();
  shared = core().Malloc(10'000);
  std::thread other([&] {
    CHECK_CU(0, driver().CtxSetCurrent(core().context().handle()));
    race(true);
    CHECK_CU(0, driver().CtxSetCurrent(nullptr));
  });
  race(false);
  other.join();
  CHECK_CU(0, core().Free(shared));
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().frees(), kRounds + 1u);
}

// ---- reset -------------------------------------------------------------------------------------------------------

// A driver whose memory is addresses only. After a reset they come again, or never do.
constexpr CUdeviceptr kFirstAddress = CUdeviceptr{1} << 44;
std::atomic<CUdeviceptr> g_next_address{kFirstAddress};

void bind_addresses(Driver& table) {
  g_next_address = kFirstAddress;
  table.cuMemAlloc_v2 = [](CUdeviceptr* out, std::size_t bytes) {
    *out = g_next_address.fetch_add(round_up(bytes, AddressMap::kPage));
    return CUDA_SUCCESS;
  };
  table.cuMemFree_v2 = [](CUdeviceptr) { return CUDA_SUCCESS; };
}

// A thread that allocates and frees by both APIs while its context is reset. What it certainly holds it was given
// entirely after the last reset; what it was given while one was under way it may hold.
//
// Where addresses come again, a free that a reset overtakes could meet another thread's block, which is the program's
// own fault: then `frees` keeps the two apart.
class Resettable {
 public:
  // `resets` is odd while one is under way.
  Resettable(Core& core, unsigned seed, const std::atomic<unsigned>& resets, std::shared_mutex* frees)
      : core_(core), random_(seed), resets_(resets), frees_(frees) {}

  void Run(const std::atomic<bool>& stop) {
    CHECK_CU(0, driver().CtxSetCurrent(core_.context().handle()));
    {
      TestStream s;
      while (!stop) Step(s);
      DropStale();
    }
    CHECK_CU(0, driver().CtxSetCurrent(nullptr));
  }
  std::vector<Taken> held;
  std::vector<Taken> perhaps;

 private:
  bool IsStale() const { return generation_ != core_.context().generation(); }
  void DropStale() {
    if (!IsStale()) return;
    generation_ = core_.context().generation();
    held.clear();
    perhaps.clear();
  }
  void Step(const TestStream& s) {
    DropStale();
    if (held.size() > 50 || random_() % 2 == 0) {
      Free(s);
      return;
    }
    const std::uint64_t bytes = 1 + random_() % (random_() % 8 == 0 ? 3 * kMiB : 60'000);
    const CUdeviceptr p = random_() % 2 == 0 ? core_.Malloc(bytes) : core_.MallocAsync(bytes, s);
    if (p == 0) return;
    if (IsStale()) {
      DropStale();
      perhaps.push_back({p, bytes});
    } else {
      held.push_back({p, bytes});
    }
  }
  void Free(const TestStream& s) {
    std::shared_lock<std::shared_mutex> lock;
    if (frees_ != nullptr) lock = std::shared_lock(*frees_);
    const unsigned resets = resets_;
    if (held.empty() || IsStale()) return;
    const CUdeviceptr p = held.back().address;
    held.pop_back();
    Segment* segment = core_.shared.map.find(p);
    Block* block = segment == nullptr ? nullptr : segment->block_at(p);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (block != nullptr) {
      result = random_() % 2 == 0 ? core_.FreeBlock(block, p) : core_.FreeBlockAsync(block, p, s, core_.context());
    }
    if (resets % 2 == 0 && resets_ == resets) {
      CHECK_CU(0, result);
    }
  }

  Core& core_;
  std::mt19937 random_;
  const std::atomic<unsigned>& resets_;
  std::shared_mutex* const frees_;
  std::uint64_t generation_ = 0;
};

TEST_P(EveryAllocator, AResetUnderRunningThreadsLeavesNoBlockInTwoHands) {
  bind_addresses(core().shared.driver);
  core().options().free = FreeMode::deferred;
  Context& context = core().context();
  for (unsigned round = 0; round < 20 && !HasFailure(); ++round) {
    const bool addresses_come_again = round % 2 == 0;
    std::shared_mutex frees;
    std::atomic<unsigned> resets{0};
    std::atomic<bool> stop{false};
    std::vector<std::unique_ptr<Resettable>> workers;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i) {
      workers.push_back(
          std::make_unique<Resettable>(core(), 100 * round + i, resets, addresses_come_again ? &frees : nullptr));
      threads.emplace_back([&, worker = workers.back().get()] { worker->Run(stop); });
    }
    while (resets < 20) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::lock_guard lock(frees);
      ++resets;
      context.closing(true);
      if (addresses_come_again) g_next_address = kFirstAddress;
      context.discard();
      context.closing(false);
      context.revive();
      ++resets;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    stop = true;
    for (std::thread& thread : threads) thread.join();

    EXPECT_TRUE(core().valid());
    std::map<CUdeviceptr, std::uint64_t> held;
    for (const auto& worker : workers) {
      for (const Taken& t : worker->held) EXPECT_TRUE(held.emplace(t.address, t.bytes).second) << "in two hands";
    }
    CUdeviceptr end = 0;
    for (const auto& [address, bytes] : held) {
      EXPECT_GE(address, end) << "blocks overlap";
      end = address + bytes;
      CHECK_CU(0, core().Free(address));
    }
    for (const auto& worker : workers) {
      for (const Taken& t : worker->perhaps) FreeAnything(t.address);
    }
    EXPECT_EQ(core().usage().requested.current(), 0u);
    EXPECT_EQ(core().usage().handed_out.current(), 0u);
    EXPECT_TRUE(core().valid());
    EXPECT_EQ(context.unused(), core().held()) << "lost memory";
    context.relieve(0);
    EXPECT_EQ(core().held(), 0u);
  }
}

// ---- lanes come and go -------------------------------------------------------------------------------------------

TEST_P(EveryAllocator, LanesOfDestroyedStreamsServeAgain) {
  core().context();
  const int lanes = Lanes();
  for (int i = 0; i < 1'000; ++i) {
    TestStream s;
    CHECK_CU(0, core().FreeAsync(core().MallocAsync(1'000, s), s));
    core().context().stream_going(s.identity);
  }
  EXPECT_EQ(core().shared.stream_lanes, 0);
  EXPECT_LE(Lanes(), std::max(lanes, 1));
  EXPECT_EQ(core().held(), kSegment);
}

TEST_P(EveryAllocator, LanesOfEndedThreadsDoNotPileUp) {
  core().context();
  for (std::uint64_t i = 0; i < 1'000; ++i) {
    std::thread([&] {
      const StreamIdentity own{CU_STREAM_PER_THREAD, 1'000'000 + i, thread_id()};
      CUdeviceptr p = 0;
      ASSERT_TRUE(core().context().allocate({1'000, Api::malloc_async, &own}, &p));
      CHECK_CU(0, core().context().free_async(core().Find(core().BlockAt(p), p), own, core().context()));
    }).join();
  }
  EXPECT_LE(Lanes(), 100);
}

// Streams that are used while their lanes are tidied away.
TEST_P(EveryAllocator, AStreamWhoseLaneWasTidiedGoesOn) {
  core().context();
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      CHECK_CU(0, driver().CtxSetCurrent(core().context().handle()));
      {
        TestStream lanes[40];
        std::mt19937 random(seed);
        for (int i = 0; i < 2'000; ++i) {
          const TestStream& s = lanes[random() % 40];
          const CUdeviceptr p = core().MallocAsync(1'000, s);
          ASSERT_NE(p, 0u);
          CHECK_CU(0, core().FreeAsync(p, s));
          if (random() % 64 == 0) core().context().relieve(0);
        }
        for (const TestStream& s : lanes) core().context().stream_going(s.identity);
      }
      CHECK_CU(0, driver().CtxSetCurrent(nullptr));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(core().shared.stream_lanes, 0);
  EXPECT_EQ(core().usage().requested.current(), 0u);
  EXPECT_EQ(core().context().unused(), core().held());
}

}  // namespace
}  // namespace cushion
