// Call stacks kept once, and their figures.
#include "core/stacks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace cushion {
namespace {

// A stack each; no tail calls, which would leave their callers alone.
[[gnu::noinline]] std::uint32_t take_one(Stacks& stacks) {
  const std::uint32_t id = stacks.take(0);
  asm volatile("");
  return id;
}
[[gnu::noinline]] std::uint32_t take_other(Stacks& stacks) {
  const std::uint32_t id = stacks.take(0);
  asm volatile("" ::: "memory");
  return id;
}

struct StacksTest : testing::Test {
  StacksTest() { stacks->configure(32, false); }
  std::unique_ptr<Stacks> stacks = std::make_unique<Stacks>();

  std::uint32_t one() { return take_one(*stacks); }
  std::uint32_t other() { return take_other(*stacks); }
  const Stacks::Stack& at(std::uint32_t id) const { return (*stacks)[id]; }
  static std::uint64_t blocks(std::uint64_t count) { return count * Stacks::kOne; }
};

TEST_F(StacksTest, OneIsKeptOnceAndNamesItsCaller) {
  std::set<std::uint32_t> ids;
  for (int i = 0; i < 10; ++i) ids.insert(one());
  for (int i = 0; i < 10; ++i) ids.insert(other());
  EXPECT_EQ(ids.size(), 2u);
  EXPECT_EQ(ids.count(0), 0u);
  EXPECT_EQ(stacks->size(), 2u);
  const Stacks::Stack& stack = at(*ids.begin());
  // In the program Cushion's own frames are kept too: this one is that of take(), and its caller is the second.
  ASSERT_GE(stack.depth, 3u);
  const Stacks::Frame& frame = stacks->frame(stack.frames[1]);
  ASSERT_GE(frame.module, 0);
  const Module& module = stacks->modules()[static_cast<std::size_t>(frame.module)];
  EXPECT_TRUE(module.program);
  const std::uint64_t address = module.bias + frame.offset;
  EXPECT_GT(address, reinterpret_cast<std::uint64_t>(&take_one));
  EXPECT_LT(address, reinterpret_cast<std::uint64_t>(&take_one) + 4096);
}

TEST_F(StacksTest, OfASampleAndOfEveryBlockAreTwo) {
  std::set<std::uint32_t> ids;
  for (const std::uint64_t interval : {0, 4096, 8192, 0, 4096, 8192}) ids.insert(stacks->take(interval));
  EXPECT_EQ(ids.size(), 3u);
}

TEST_F(StacksTest, TheDepthIsKept) {
  stacks->configure(2, false);
  EXPECT_EQ(at(one()).depth, 2u);
}

TEST_F(StacksTest, FiguresFollowTheBlocks) {
  const std::uint32_t a = one();
  const std::uint32_t b = other();
  stacks->allocated(a, 0x1000, 100);
  stacks->allocated(b, 0x2000, 50);
  stacks->allocated(a, 0x3000, 10);
  stacks->freed(a, 0x1000, 100, 1000);
  EXPECT_EQ(at(a).allocated.count, blocks(2));
  EXPECT_EQ(at(a).allocated.bytes, 110u);
  EXPECT_EQ(at(a).live.count, blocks(1));
  EXPECT_EQ(at(a).live.bytes, 10u);
  EXPECT_EQ(at(b).live.bytes, 50u);
  EXPECT_EQ(stacks->ages()[10], blocks(1));  // 1000 has ten bits
}

TEST_F(StacksTest, TheHighestMomentIsKeptForEach) {
  const std::uint32_t a = one();
  const std::uint32_t b = other();
  const auto peaks = [&] { return std::pair{stacks->at_peak(at(a)).bytes, stacks->at_peak(at(b)).bytes}; };
  stacks->allocated(a, 1, 100);
  stacks->allocated(b, 2, 50);
  EXPECT_EQ(peaks(), std::pair(100ul, 50ul));
  stacks->freed(a, 1, 100, 1);
  stacks->freed(b, 2, 50, 1);
  EXPECT_EQ(peaks(), std::pair(100ul, 50ul));
  stacks->allocated(b, 3, 140);  // below
  EXPECT_EQ(peaks(), std::pair(100ul, 50ul));
  stacks->allocated(a, 4, 11);  // above: 151
  EXPECT_EQ(peaks(), std::pair(11ul, 140ul));
  stacks->freed(b, 3, 140, 1);
  stacks->allocated(b, 5, 140);  // as high, not higher
  EXPECT_EQ(peaks(), std::pair(11ul, 140ul));
  stacks->freed(a, 4, 11, 1);
  EXPECT_EQ(peaks(), std::pair(11ul, 140ul));
}

TEST_F(StacksTest, WhatIsFreedBeforeTheThreadsNextAllocationIsTemporary) {
  const std::uint32_t a = one();
  stacks->allocated(a, 1, 100);
  stacks->freed(a, 1, 100, 1);
  EXPECT_EQ(at(a).temporary, blocks(1));
  stacks->allocated(a, 2, 100);
  stacks->allocated(a, 3, 100);
  stacks->freed(a, 2, 100, 1);
  EXPECT_EQ(at(a).temporary, blocks(1));
  std::thread([&] { stacks->freed(a, 3, 100, 1); }).join();
  EXPECT_EQ(at(a).temporary, blocks(1));
}

TEST_F(StacksTest, WaitsAreTheirCallers) {
  const std::uint32_t a = one();
  stacks->waited(a, 30);
  stacks->waited(a, 12);
  EXPECT_EQ(at(a).waits, 2u);
  EXPECT_EQ(at(a).wait_ticks, 42u);
}

// The sum over a sample is the sum over all, within four standard deviations, for blocks below, near and above the
// interval; and what comes goes, to the byte.
TEST_F(StacksTest, EstimatesAreUnbiased) {
  constexpr std::uint64_t kInterval = 64 << 10;
  for (const std::uint64_t bytes : {std::uint64_t{1} << 10, std::uint64_t{60} << 10, std::uint64_t{200} << 10}) {
    constexpr int kBlocks = 100000;
    std::vector<std::uint32_t> ids;
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint32_t id = stacks->sample(bytes, kInterval);
      if (id == 0) continue;
      stacks->allocated(id, static_cast<std::uint64_t>(i), bytes);
      ids.push_back(id);
    }
    ASSERT_FALSE(ids.empty());
    const double p = -std::expm1(-static_cast<double>(bytes) / kInterval);
    std::uint64_t count = 0;
    std::uint64_t total = 0;
    const std::set<std::uint32_t> distinct(ids.begin(), ids.end());
    for (const std::uint32_t id : distinct) {
      EXPECT_EQ(at(id).interval, kInterval);
      count += at(id).live.count;
      total += at(id).live.bytes;
    }
    const double deviation = std::sqrt(kBlocks * (1 - p) / p) + kBlocks * 1e-4;
    EXPECT_NEAR(static_cast<double>(count) / Stacks::kOne, kBlocks, 4 * deviation) << bytes;
    EXPECT_NEAR(static_cast<double>(total), static_cast<double>(bytes) * kBlocks,
                4 * deviation * static_cast<double>(bytes))
        << bytes;
    for (const std::uint32_t id : ids) stacks->freed(id, 0, bytes, 1);
    for (const std::uint32_t id : distinct) {
      EXPECT_EQ(at(id).live.count, 0u);
      EXPECT_EQ(at(id).live.bytes, 0u);
    }
  }
}

TEST_F(StacksTest, AChangedIntervalCountsFromTheNextBlock) {
  for (int i = 0; i < 100; ++i) EXPECT_EQ(stacks->sample(1, std::uint64_t{1} << 60), 0u);
  EXPECT_NE(stacks->sample(1 << 20, 1), 0u);
}

TEST_F(StacksTest, ManyThreadsKeepOneTable) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 2000;
  std::vector<std::thread> threads;
  std::vector<std::set<std::uint32_t>> ids(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        const std::uint32_t id = i % 2 != 0 ? one() : other();
        ids[static_cast<std::size_t>(t)].insert(id);
        const auto address = static_cast<std::uint64_t>(t * kRounds + i + 1);
        stacks->allocated(id, address, 100);
        stacks->freed(id, address, 100, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<std::set<std::uint32_t>>(ids.begin(), ids.end()).size(), 1u);
  EXPECT_EQ(stacks->size(), ids[0].size());
  std::uint64_t allocated = 0;
  for (std::uint32_t id = 1; id <= stacks->size(); ++id) {
    allocated += at(id).allocated.count;
    EXPECT_EQ(at(id).live.count, 0u);
  }
  EXPECT_EQ(allocated, blocks(kThreads * kRounds));
}

}  // namespace
}  // namespace cushion
