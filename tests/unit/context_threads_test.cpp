// Context under many threads: no block is in two hands, and every sum comes out even.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

constexpr std::uint64_t kMicrosecond = 1'000;

struct Held {
  CUdeviceptr address;
  std::uint64_t bytes;
};

// What one thread does: its own stream, blocks of its own and some that it shares. Every block is filled by a kernel
// that holds it a while and then counts changed bytes, so that a block in two hands shows in `bad`.
class Worker {
 public:
  Worker(Core& core, unsigned seed, CUdeviceptr bad, std::mutex& mutex, std::vector<Held>& bag)
      : core_(core), seed_(seed), random_(seed), bad_(bad), mutex_(mutex), bag_(bag) {}

  void Run(int steps) {
    CHECK_CU(0, driver().CtxSetCurrent(core_.context().handle()));
    {
      TestStream lane;
      core_.shared.streams.add(lane, core_.context().handle());
      for (int i = 0; i < steps; ++i) Step(lane);
      for (const Held& h : mine_) CHECK_CU(0, core_.FreeAsync(h.address, lane));
      core_.shared.streams.remove(lane);
      core_.context().stream_going(lane.identity);
    }
    CHECK_CU(0, driver().CtxSetCurrent(nullptr));
  }

 private:
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }

  void Use(CUstream stream, const Held& h) {
    // The kernel looks at the first part only: what matters is whose the bytes are.
    const std::uint64_t bytes = std::min<std::uint64_t>(h.bytes, 4096);
    CHECK_CU(0, harness::LaunchFillHoldCheck(stream, h.address, bytes, seed_, 20 * kMicrosecond, bad_));
  }

  void Step(TestStream& lane) {
    switch (Below(8)) {
      case 0:
      case 1:
      case 2: {
        const std::uint64_t bytes = 1 + Below(Below(4) == 0 ? 3 * kMiB : 50'000);
        const Held h{core_.MallocAsync(bytes, lane), bytes};
        if (h.address == 0) break;
        Use(lane, h);
        mine_.push_back(h);
        break;
      }
      case 3: {
        const std::uint64_t bytes = 1 + Below(100'000);
        const Held h{core_.Malloc(bytes), bytes};
        if (h.address == 0) break;
        Use(lane, h);
        const std::lock_guard lock(mutex_);
        bag_.push_back(h);
        break;
      }
      case 4: {  // cudaFree waits for every stream, so any thread may free any block
        Held h{};
        {
          const std::lock_guard lock(mutex_);
          if (bag_.empty()) break;
          h = bag_.back();
          bag_.pop_back();
        }
        CHECK_CU(0, core_.Free(h.address));
        break;
      }
      case 5:
        if (Below(20) == 0) core_.context().relieve(0);
        break;
      default: {
        if (mine_.empty()) break;
        std::swap(mine_[Below(mine_.size())], mine_.back());
        const Held h = mine_.back();
        mine_.pop_back();
        CHECK_CU(0, Below(8) == 0 ? core_.Free(h.address) : core_.FreeAsync(h.address, lane));
      }
    }
  }

  Core& core_;
  const unsigned seed_;
  std::mt19937_64 random_;
  const CUdeviceptr bad_;
  std::vector<Held> mine_;
  std::mutex& mutex_;
  std::vector<Held>& bag_;
};

class ContextThreadsTest : public ContextTest {
 protected:
  void RunThreads(int steps) {
    core().context();
    harness::SharedWord bad;
    std::mutex mutex;
    std::vector<Held> bag;
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 8; ++seed) {
      threads.emplace_back([&, seed] { Worker(core(), seed, bad.on_device(), mutex, bag).Run(steps); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Held& h : bag) CHECK_CU(0, core().Free(h.address));
    Synchronize();
    EXPECT_EQ(bad.Get(), 0u);
    EXPECT_TRUE(core().valid());
    EXPECT_EQ(core().usage().requested.current(), 0u);
    EXPECT_EQ(core().usage().handed_out.current(), 0u);
    EXPECT_EQ(core().usage().held.current(), core().held());
    EXPECT_EQ(core().shared.stream_lanes, 0);
    // Nothing is stranded: all of it can go back.
    core().context().relieve(1'000 * harness::kMillisecond);
    EXPECT_EQ(core().held(), 0u);
  }
};

TEST_F(ContextThreadsTest, WithRoom) { RunThreads(300); }

TEST_F(ContextThreadsTest, UnderPressure) {
  core().options().max_size = {12 * kMiB, -1};
  RunThreads(300);
  EXPECT_LE(core().usage().held.peak(), 12 * kMiB);
}

TEST_F(ContextThreadsTest, Deferred) {
  core().options().free = FreeMode::deferred;
  core().options().max_size = {32 * kMiB, -1};
  RunThreads(300);
}

TEST_F(ContextThreadsTest, OldDriver) {
  core().shared.driver.cuCtxRecordEvent = nullptr;
  core().options().max_size = {32 * kMiB, -1};
  RunThreads(150);
}

TEST_F(ContextThreadsTest, GrowthFromManyThreadsKeepsToMaxSize) {
  core().options().max_size = {10 * kSegment, -1};
  core().context();
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 5; ++n) {
        CUdeviceptr p = 0;
        if (core().context().allocate({kSegment, Api::malloc, nullptr}, &p)) ++served;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(served, 10);
  EXPECT_EQ(core().usage().held.peak(), 10 * kSegment);
}

}  // namespace
}  // namespace cushion
