// Memory that is mapped in pieces (vmm.h): growth by what lacks, scattered handles mapped together, handles given back,
// what must not be unmapped, calls that fail, and the end of the context.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "core/vmm.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

class VmmTest : public ContextTest {
 protected:
  void SetUp() override {
    ContextTest::SetUp();
    if (IsSkipped()) return;
    core().options().backing = Backing::vmm;
    before_ = Hog::Free();
  }
  // Of the device, what is taken since the test began, but for the byte that is kept for waits without a fence.
  std::uint64_t Taken() { return before_ - Hog::Free() - kSpare; }
  static constexpr std::uint64_t kSpare = 2 * kMiB;  // a page of the device
  CUdeviceptr Filled(std::uint64_t bytes, unsigned char value) {
    const CUdeviceptr p = core().Malloc(bytes);
    EXPECT_NE(p, 0u) << bytes;
    if (p != 0) {
      CHECK_CU(0, driver().MemsetD8(p, value, bytes));
    }
    return p;
  }
  void ExpectFilled(CUdeviceptr p, std::uint64_t bytes, unsigned char value) {
    const auto seen = harness::Bytes(p, bytes);
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [&](unsigned char b) { return b == value; })) << int{value};
  }
  // Blocks of 8 MiB between blocks of 2 MiB, each a handle; the large ones are then freed.
  struct Scattered {
    std::vector<CUdeviceptr> small;
    std::uint64_t held = 0;
  };
  Scattered Scatter(unsigned count) {
    Scattered made;
    std::vector<CUdeviceptr> large;
    for (unsigned i = 0; i < count; ++i) {
      made.small.push_back(Filled(2 * kMiB, static_cast<unsigned char>(i + 1)));
      large.push_back(Filled(8 * kMiB, 0xEE));
    }
    for (const CUdeviceptr p : large) CHECK_CU(0, core().Free(p));
    made.held = core().held();
    EXPECT_EQ(made.held, count * 10 * kMiB);
    return made;
  }
  void ExpectIntact(const Scattered& made) {
    for (std::size_t i = 0; i < made.small.size(); ++i)
      ExpectFilled(made.small[i], 2 * kMiB, static_cast<unsigned char>(i + 1));
  }
  void Free(const Scattered& made) {
    for (const CUdeviceptr p : made.small) CHECK_CU(0, core().Free(p));
  }

 private:
  std::uint64_t before_ = 0;
};

TEST_F(VmmTest, GrowsByWhatLacks) {
  const CUdeviceptr a = Filled(3 * kMiB, 1);
  EXPECT_EQ(core().held(), 4 * kMiB);
  const CUdeviceptr b = Filled(3 * kMiB, 2);  // begins in the first one's last page
  EXPECT_EQ(b, a + 3 * kMiB);
  EXPECT_EQ(core().held(), 6 * kMiB);
  const CUdeviceptr c = Filled(5 * kMiB + 1, 3);
  EXPECT_EQ(core().held(), 12 * kMiB);
  ExpectFilled(a, 3 * kMiB, 1);
  ExpectFilled(b, 3 * kMiB, 2);
  ExpectFilled(c, 5 * kMiB + 1, 3);
  EXPECT_EQ(Taken(), 12 * kMiB);
  for (const CUdeviceptr p : {a, b, c}) CHECK_CU(0, core().Free(p));
  EXPECT_EQ(core().Malloc(12 * kMiB), a);  // one block across three handles
  EXPECT_EQ(core().held(), 12 * kMiB);
}

TEST_F(VmmTest, GrowsByAShareOfWhatIsHeld) {
  core().options().growth_max.bytes = std::uint64_t{1} << 30;
  Filled(512 * kMiB, 1);
  Filled(kMiB, 2);
  EXPECT_EQ(core().held(), 528 * kMiB);  // a thirty-second more
}

TEST_F(VmmTest, ScatteredHandlesServeALargeRequest) {
  const Scattered made = Scatter(4);
  core().options().max_size = Size{made.held, -1};
  const CUdeviceptr p = Filled(32 * kMiB, 0x77);
  ExpectFilled(p, 32 * kMiB, 0x77);
  ExpectIntact(made);
  EXPECT_EQ(core().held(), made.held);
  EXPECT_EQ(Taken(), made.held);
  EXPECT_EQ(counters().remaps, 1u);
  EXPECT_EQ(core().Malloc(512), 0u);  // all of it is used
  CHECK_CU(0, core().Free(p));
  Free(made);
}

TEST_F(VmmTest, ScatteredHandlesServeOnAFullDevice) {
  const Scattered made = Scatter(4);
  const Hog hog(0);
  const CUdeviceptr p = Filled(32 * kMiB, 0x77);
  ExpectIntact(made);
  CHECK_CU(0, core().Free(p));
  EXPECT_EQ(counters().out_of_memory, 0u);
}

// Small blocks between the large ones, as long as there is memory. They lie together, so the large ones' handles are
// free when those are.
TEST_F(VmmTest, SmallBlocksKeepFewHandles) {
  core().options().growth_max.bytes = std::uint64_t{1} << 30;
  core().options().max_size = Size{3 * std::uint64_t{1024} * kMiB, -1};
  std::vector<CUdeviceptr> small;
  std::vector<CUdeviceptr> large;
  for (bool full = false; !full;) {
    for (auto [blocks, bytes] : {std::pair(&small, kMiB), std::pair(&large, 64 * kMiB)}) {
      const CUdeviceptr p = core().Malloc(bytes);
      full = p == 0;
      if (full) break;
      blocks->push_back(p);
    }
  }
  ASSERT_GT(large.size(), 40u);
  for (const CUdeviceptr p : large) CHECK_CU(0, core().Free(p));
  const std::uint64_t held = core().held();
  const CUdeviceptr p = core().Malloc(large.size() * 64 * kMiB / 10 * 6);
  EXPECT_NE(p, 0u);
  EXPECT_EQ(core().held(), held);
  EXPECT_EQ(counters().remaps, 1u);
  small.push_back(p);
  for (const CUdeviceptr q : small) CHECK_CU(0, core().Free(q));
  core().context().relieve(0);  // the device is the other tests' too
}

// What little lies idle is not worth moving while there is more.
TEST_F(VmmTest, ALittleIdleMemoryStaysWhereItIs) {
  const CUdeviceptr below = Filled(2 * kMiB, 1);
  const CUdeviceptr idle = Filled(2 * kMiB, 2);
  const CUdeviceptr above = Filled(60 * kMiB, 3);
  CHECK_CU(0, core().Free(idle));
  const CUdeviceptr p = Filled(4 * kMiB, 4);
  EXPECT_EQ(core().held(), 68 * kMiB);
  EXPECT_EQ(counters().remaps, 0u);
  EXPECT_EQ(core().Malloc(2 * kMiB), idle);
  for (const CUdeviceptr q : {below, above, p}) CHECK_CU(0, core().Free(q));
}

TEST_F(VmmTest, AHandleThatHoldsABlockStaysWhereItIs) {
  std::vector<CUdeviceptr> kept;
  std::vector<CUdeviceptr> freed;
  for (int i = 0; i < 4; ++i) {
    freed.push_back(Filled(3 * kMiB, 1));
    kept.push_back(Filled(kMiB, 2));
  }
  for (const CUdeviceptr p : freed) CHECK_CU(0, core().Free(p));
  core().options().max_size = Size{core().held(), -1};  // 16 MiB in handles of 4 and 2; of each 4 or 2 a part is free
  const CUdeviceptr p = core().Malloc(12 * kMiB);
  EXPECT_EQ(p, 0u);
  for (const CUdeviceptr q : kept) ExpectFilled(q, kMiB, 2);
}

// A kernel writes until the gate opens; then its memory may go elsewhere.
TEST_F(VmmTest, WhatTheDeviceUsesIsNotUnmapped) {
  TestStream busy;
  const CUdeviceptr first = core().MallocAsync(8 * kMiB, busy);
  const CUdeviceptr wall = Filled(2 * kMiB, 1);
  const CUdeviceptr second = core().MallocAsync(8 * kMiB, busy);
  const std::uint64_t held = core().held();
  core().options().max_size = Size{held, -1};
  Gate gate;
  gate.Hold(busy);
  for (const CUdeviceptr p : {first, second}) {
    CHECK_CU(0, driver().MemsetD8Async(p, 9, 8 * kMiB, busy));
    CHECK_CU(0, core().FreeAsync(p, busy));
  }
  EXPECT_EQ(core().context().relieve(0), 0u);
  EXPECT_EQ(core().Malloc(16 * kMiB), 0u);
  EXPECT_EQ(core().held(), held);
  gate.Open();
  busy.Finish();
  const CUdeviceptr p = Filled(16 * kMiB, 3);
  ExpectFilled(p, 16 * kMiB, 3);
  ExpectFilled(wall, 2 * kMiB, 1);
  EXPECT_EQ(core().held(), held);
}

TEST_F(VmmTest, IdleHandlesGoBackFromTheMiddle) {
  const Scattered made = Scatter(4);
  EXPECT_EQ(core().context().unused(), 32 * kMiB);
  EXPECT_EQ(core().context().relieve(0), 4u);
  EXPECT_EQ(core().held(), 8 * kMiB);
  EXPECT_EQ(Taken(), 8 * kMiB);
  ExpectIntact(made);
  const CUdeviceptr p = Filled(8 * kMiB, 5);  // fits where one was
  EXPECT_LT(p, made.small.back());
  EXPECT_EQ(core().held(), 16 * kMiB);
  ExpectIntact(made);
}

TEST_F(VmmTest, ARunningKernelDoesNotHoldThemBack) {
  const Scattered made = Scatter(2);
  TestStream other;
  Gate gate;
  gate.Hold(other);
  EXPECT_EQ(core().context().relieve(0), 2u);
  EXPECT_TRUE(other.Busy());
  EXPECT_EQ(Taken(), 4 * kMiB);
}

TEST_F(VmmTest, AboveTheThresholdTheyGoBackWhenTheProgramSynchronises) {
  core().options().release_threshold = Size{10 * kMiB, -1};
  const Scattered made = Scatter(4);
  core().context().synchronized(core().context().advance(), core().context().generation());
  EXPECT_EQ(core().context().unused(), 8 * kMiB);  // one handle of four
  ExpectIntact(made);
}

TEST_F(VmmTest, TheEndOfTheContextGivesEverythingBack) {
  const Scattered made = Scatter(3);
  core().context().discard();
  EXPECT_EQ(Taken(), 0u);
  EXPECT_EQ(core().held(), 0u);
  core().context().revive();
  const CUdeviceptr p = Filled(2 * kMiB, 1);
  CHECK_CU(0, core().Free(p));
}

TEST_F(VmmTest, AnotherDeviceIsAdmittedToAllAndToWhatComes) {
  static std::vector<std::pair<int, bool>> calls;
  static decltype(core().shared.driver.cuMemSetAccess) real;
  calls.clear();
  real = core().shared.driver.cuMemSetAccess;
  core().shared.driver.cuMemSetAccess = [](CUdeviceptr p, std::size_t n, const CUmemAccessDesc* a, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) calls.push_back({a[i].location.id, a[i].flags != 0});
    return real(p, n, a, 1);  // this machine has one device
  };
  Filled(2 * kMiB, 1);
  core().context().admit(7, true);
  Filled(2 * kMiB, 2);
  core().context().admit(7, false);
  Filled(2 * kMiB, 3);
  EXPECT_EQ(calls,
            (std::vector<std::pair<int, bool>>{{0, true}, {7, true}, {0, true}, {7, true}, {7, false}, {0, true}}));
}

TEST_F(VmmTest, WithoutTheDriversFunctionsMemoryComesFromCuMemAlloc) {
  core().shared.driver.cuMemUnmap = nullptr;
  const CUdeviceptr p = core().Malloc(3 * kMiB);
  EXPECT_NE(p, 0u);
  EXPECT_FALSE(core().context().vmm().on());
  EXPECT_STREQ(core().context().vmm().why(), "the driver is older than 12.5");
  CHECK_CU(0, core().Free(p));
}

TEST_F(VmmTest, AutoTakesItForOneProcessWithOneDevice) {
  core().options().backing = Backing::automatic;
  EXPECT_TRUE(core().context().vmm().on());
  EXPECT_STREQ(core().context().vmm().why(), "one device, one process");
}

TEST_F(VmmTest, AutoLeavesItToOneOfSeveralProcesses) {
  core().options().backing = Backing::automatic;
  core().shared.one_of_many = true;
  EXPECT_FALSE(core().context().vmm().on());
}

TEST_F(VmmTest, AutoLeavesItWhereThereAreSeveralDevices) {
  core().options().backing = Backing::automatic;
  core().shared.driver.cuDeviceGetCount = [](int* count) {
    *count = 2;
    return CUDA_SUCCESS;
  };
  EXPECT_FALSE(core().context().vmm().on());
}

// Each of its calls fails once, at each of its first times. What a request then gets is memory or nothing, blocks keep
// what they hold, and no memory is lost.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kEach = 5;  // they take ten times as long
#else
constexpr int kEach = 1;
#endif
int g_calls = 0;
int g_fails_at = 0;
CUresult g_error = CUDA_SUCCESS;
bool fails() { return ++g_calls == g_fails_at; }
#define FAILING(function)                                                        \
  [](Driver& d) {                                                                \
    static decltype(d.function) real;                                            \
    real = d.function;                                                           \
    d.function = [](auto... args) { return fails() ? g_error : real(args...); }; \
  }

TEST_F(VmmTest, ACallThatFailsLosesNothing) {
  const std::function<void(Driver&)> functions[] = {
      FAILING(cuMemAddressReserve), FAILING(cuMemCreate), FAILING(cuMemMap),
      FAILING(cuMemSetAccess),      FAILING(cuMemUnmap),  FAILING(cuMemRelease)};
  for (const CUresult error : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN}) {
    for (const auto& function : functions) {
      for (int at = 1; at <= 12; at += kEach) {
        const std::uint64_t before = Hog::Free();
        Core fresh;
        fresh.options().backing = Backing::vmm;
        g_calls = 0;
        g_fails_at = at;
        g_error = error;
        function(fresh.shared.driver);
        std::vector<std::pair<CUdeviceptr, unsigned char>> small;
        std::vector<CUdeviceptr> large;
        for (unsigned char i = 0; i < 4; ++i) {
          if (const CUdeviceptr p = fresh.Malloc(2 * kMiB); p != 0) {
            CHECK_CU(0, driver().MemsetD8(p, i, 2 * kMiB));
            small.push_back({p, i});
          }
          if (const CUdeviceptr p = fresh.Malloc(8 * kMiB); p != 0) large.push_back(p);
        }
        for (const CUdeviceptr p : large) CHECK_CU(0, fresh.Free(p));
        const CUdeviceptr p = fresh.Malloc(30 * kMiB);
        if (p != 0) {
          CHECK_CU(0, driver().MemsetD8(p, 0xAA, 30 * kMiB));
        }
        EXPECT_TRUE(fresh.valid()) << at;
        for (const auto& [q, value] : small) {
          ExpectFilled(q, 2 * kMiB, value);
          CHECK_CU(0, fresh.Free(q));
        }
        if (p != 0) {
          CHECK_CU(0, fresh.Free(p));
        }
        fresh.context().relieve(0);
        fresh.context().discard();
        const std::uint64_t lost = before - Hog::Free();
        EXPECT_TRUE(lost == 0 || lost == kSpare) << lost << " at " << at << " of error " << error;
      }
    }
  }
}

// What was mapped when the access failed cannot be unmapped either: it stays nobody's, and held, until the context
// ends.
TEST_F(VmmTest, AMappingThatNeitherServesNorGoesIsNobodysUntilTheEnd) {
  static decltype(core().shared.driver.cuMemSetAccess) access;
  static decltype(core().shared.driver.cuMemUnmap) unmap;
  static int failures = 0;
  access = core().shared.driver.cuMemSetAccess;
  unmap = core().shared.driver.cuMemUnmap;
  failures = 0;
  core().shared.driver.cuMemSetAccess = [](auto... args) {
    return failures++ == 0 ? CUDA_ERROR_UNKNOWN : access(args...);
  };
  core().shared.driver.cuMemUnmap = [](auto... args) { return failures++ == 1 ? CUDA_ERROR_UNKNOWN : unmap(args...); };
  EXPECT_EQ(core().Malloc(8 * kMiB), 0u);
  EXPECT_EQ(core().held(), 8 * kMiB);
  const CUdeviceptr p = Filled(8 * kMiB, 1);  // elsewhere
  EXPECT_EQ(core().held(), 16 * kMiB);
  CHECK_CU(0, core().Free(p));
  core().context().discard();
  EXPECT_EQ(core().held(), 0u);
  EXPECT_EQ(Taken(), 0u);
}

// A reset while a thread grows: what it made goes too, and what comes later belongs to nobody that is gone.
TEST_F(VmmTest, TheContextEndsWhileAThreadGrows) {
  static std::atomic<int> growing{0};
  static std::atomic<bool> go{false};
  static decltype(core().shared.driver.cuMemCreate) real;
  growing = 0;
  go = false;
  Filled(2 * kMiB, 1);
  real = core().shared.driver.cuMemCreate;
  core().shared.driver.cuMemCreate = [](auto... args) {
    ++growing;
    while (!go) std::this_thread::yield();
    return real(args...);
  };
  std::vector<std::thread> threads;
  const CUcontext handle = core().context().handle();
  for (int i = 0; i < 2; ++i) {  // the second waits for the first one's calls
    threads.emplace_back([&, handle] {
      CHECK_CU(0, driver().CtxSetCurrent(handle));
      core().Malloc(64 * kMiB);
    });
  }
  while (growing == 0) std::this_thread::yield();
  threads.emplace_back([&] { core().context().discard(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  go = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(core().valid());
  core().context().discard();
  EXPECT_EQ(core().held(), 0u);
  EXPECT_EQ(Taken(), 0u);
}

// A thread that grows holds no lock that a thread needs which finds what it wants.
TEST_F(VmmTest, WhoGrowsHoldsNobodyUp) {
  static std::atomic<int> growing{0};
  static std::atomic<bool> go{false};
  static decltype(core().shared.driver.cuMemCreate) real;
  growing = 0;
  go = false;
  const CUdeviceptr p = Filled(2 * kMiB, 1);
  CHECK_CU(0, core().Free(p));
  real = core().shared.driver.cuMemCreate;
  core().shared.driver.cuMemCreate = [](auto... args) {
    growing = 1;
    while (!go) std::this_thread::yield();
    return real(args...);
  };
  std::thread grower([&] {
    CHECK_CU(0, driver().CtxSetCurrent(core().context().handle()));
    EXPECT_NE(core().Malloc(64 * kMiB), 0u);
  });
  while (growing == 0) std::this_thread::yield();
  for (int i = 0; i < 100; ++i) {
    const CUdeviceptr q = core().Malloc(kMiB);
    EXPECT_NE(q, 0u);
    CHECK_CU(0, core().Free(q));
  }
  EXPECT_EQ(growing, 1);
  go = true;
  grower.join();
}

TEST_F(VmmTest, ThreadsGrowMoveAndGiveBackAtOnce) {
  core().options().max_size = Size{96 * kMiB, -1};
  const CUcontext handle = core().context().handle();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      CHECK_CU(0, driver().CtxSetCurrent(handle));
      std::mt19937 random(t);
      std::vector<CUdeviceptr> mine;
      for (int i = 0; i < 300; ++i) {
        if (mine.size() < 4 && random() % 3 != 0) {
          if (const CUdeviceptr p = core().Malloc((random() % 40 + 1) * 512 * 1024); p != 0) mine.push_back(p);
        } else if (!mine.empty()) {
          CHECK_CU(0, core().Free(mine.back()));
          mine.pop_back();
        }
        if (random() % 32 == 0) core().context().relieve(0);
      }
      for (const CUdeviceptr p : mine) CHECK_CU(0, core().Free(p));
    });
  }
  for (std::thread& thread : threads) thread.join();
  Synchronize();
  core().context().relieve(0);
  EXPECT_EQ(core().held(), 0u);
  EXPECT_EQ(Taken(), 0u);
}

}  // namespace
}  // namespace cushion
