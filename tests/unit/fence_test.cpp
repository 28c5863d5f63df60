// Fences: stamps and what is known complete of them; spare events and the generations they belong to.
#include "core/fence.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace cushion {
namespace {

Fence fence(std::uint64_t stamp) {
  Fence f;
  f.stamp = stamp;
  return f;
}

// Claims the next fence and says whether there was one; `id` is 0 then.
std::uint64_t claim(FenceSet& set) {
  std::vector<FenceEvent> events;
  return set.claim(events);
}

TEST(FenceSet, AFenceCoversTheFreesBeforeItAndNoneAfter) {
  FenceSet set;
  const std::uint64_t before = set.now();
  EXPECT_GT(before, 0u);  // 0 is "clean"
  EXPECT_EQ(set.now(), before);
  const std::uint64_t covered = set.advance();
  EXPECT_LE(before, covered);
  EXPECT_GT(set.now(), covered);
}

TEST(FenceSet, WhatIsKnownCompleteNeverShrinks) {
  FenceSet set;
  EXPECT_EQ(set.clean_through(), 0u);
  set.completed(5);
  set.completed(3);
  EXPECT_EQ(set.clean_through(), 5u);
}

TEST(FenceSet, WantsAFenceOnlyForFreesThatNoneCovers) {
  FenceSet set;
  EXPECT_FALSE(set.wants_fence(0));
  EXPECT_TRUE(set.wants_fence(1));
  set.add(fence(4));
  EXPECT_FALSE(set.wants_fence(4));
  EXPECT_TRUE(set.wants_fence(5));
  set.completed(6);
  EXPECT_FALSE(set.wants_fence(6));
  EXPECT_TRUE(set.wants_fence(7));
}

TEST(FenceSet, HoldsNoMoreFencesThanItsBound) {
  FenceSet set;
  for (std::uint64_t stamp = 1; stamp <= FenceSet::kMost; ++stamp) {
    EXPECT_TRUE(set.wants_fence(stamp));
    set.add(fence(stamp));
  }
  EXPECT_FALSE(set.wants_fence(1'000));
  set.finish(claim(set), true);
  EXPECT_TRUE(set.wants_fence(1'000));
}

TEST(FenceSet, TheOldestIsAskedFirstAndByOneThreadAtATime) {
  FenceSet set;
  EXPECT_EQ(claim(set), 0u);
  set.add(fence(4));
  set.add(fence(9));
  const std::uint64_t first = claim(set);
  const std::uint64_t second = claim(set);
  EXPECT_NE(first, 0u);
  EXPECT_NE(second, 0u);
  EXPECT_NE(second, first);
  EXPECT_EQ(claim(set), 0u);
  set.finish(first, false);
  EXPECT_EQ(claim(set), first);
  set.finish(first, true);
  EXPECT_EQ(set.clean_through(), 4u);
}

TEST(FenceSet, AFenceThatIsNotCompleteCleansNothing) {
  FenceSet set;
  set.add(fence(4));
  set.finish(claim(set), false);
  EXPECT_EQ(set.clean_through(), 0u);
  EXPECT_FALSE(set.wants_fence(4));
}

TEST(FenceSet, FencesMayCompleteOutOfOrder) {
  FenceSet set;
  set.add(fence(4));
  set.add(fence(9));
  const std::uint64_t first = claim(set);
  const std::uint64_t second = claim(set);
  set.finish(second, true);
  EXPECT_EQ(set.clean_through(), 9u);
  set.finish(first, true);
  EXPECT_EQ(set.clean_through(), 9u);
  EXPECT_EQ(claim(set), 0u);
}

TEST(FenceSet, AFenceThatIsGoneIsFinishedInVain) {
  FenceSet set;
  set.add(fence(400));
  const std::uint64_t id = claim(set);
  set.abandon();
  set.finish(id, true);
  EXPECT_LT(set.clean_through(), 400u);
}

TEST(FenceSet, AnAbandonedSetOwesNothingAndItsStampsGoOn) {
  FenceSet set;
  set.advance();
  const std::uint64_t old = set.now();
  set.add(fence(1));
  set.abandon();
  EXPECT_EQ(claim(set), 0u);
  EXPECT_EQ(set.clean_through(), old);
  EXPECT_GT(set.now(), old);
  EXPECT_TRUE(set.wants_fence(set.now()));
}

// A driver of one context that makes events and says whether they are complete.
int g_created = 0;
CUresult g_create_result = CUDA_SUCCESS;
CUresult g_query_result = CUDA_SUCCESS;
int g_queries = 0;
const CUcontext kContext = reinterpret_cast<CUcontext>(0x10);

CUevent event_of(int number) { return reinterpret_cast<CUevent>(static_cast<std::uintptr_t>(number)); }

class EventPoolTest : public testing::Test {
 protected:
  void SetUp() override {
    g_created = 0;
    g_queries = 0;
    g_create_result = g_query_result = CUDA_SUCCESS;
    driver.cuCtxGetCurrent = [](CUcontext* out) {
      *out = kContext;
      return CUDA_SUCCESS;
    };
    driver.cuEventCreate = [](CUevent* out, unsigned flags) {
      EXPECT_EQ(flags, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING));
      if (g_create_result == CUDA_SUCCESS) *out = event_of(++g_created);
      return g_create_result;
    };
    driver.cuEventQuery = [](CUevent) {
      ++g_queries;
      return g_query_result;
    };
  }
  CUevent take() { return pool.take(driver, kContext); }

  Driver driver;
  EventPool pool;
};

TEST_F(EventPoolTest, AnEventIsUsedAgainOnlyOnceItIsPutBack) {
  CUevent first = take();
  EXPECT_EQ(first, event_of(1));
  EXPECT_EQ(take(), event_of(2));
  pool.put(first, pool.generation());
  EXPECT_EQ(take(), first);
  EXPECT_EQ(take(), event_of(3));
}

TEST_F(EventPoolTest, ADriverThatRefusesGivesNone) {
  g_create_result = CUDA_ERROR_OUT_OF_MEMORY;
  EXPECT_EQ(take(), nullptr);
}

TEST_F(EventPoolTest, EventsOfAContextThatWasResetAreNeverUsedAgain) {
  CUevent spare = take();
  CUevent out = take();
  const std::uint64_t generation = pool.generation();
  pool.put(spare, generation);
  pool.discard();
  EXPECT_GT(pool.generation(), generation);
  EXPECT_EQ(take(), event_of(3));
  pool.put(out, generation);
  EXPECT_EQ(take(), event_of(4));
}

TEST_F(EventPoolTest, AnErrorIsNotCompletion) {
  const FenceEvent event{&pool, pool.generation(), take()};
  EXPECT_EQ(event.query(driver), CUDA_SUCCESS);
  g_query_result = CUDA_ERROR_NOT_READY;
  EXPECT_EQ(event.query(driver), CUDA_ERROR_NOT_READY);
  g_query_result = CUDA_ERROR_LAUNCH_FAILED;
  EXPECT_EQ(event.query(driver), CUDA_ERROR_LAUNCH_FAILED);
}

TEST_F(EventPoolTest, AResetContextHasNoWorkLeftAndItsEventIsNotAsked) {
  FenceEvent event{&pool, pool.generation(), take()};
  g_query_result = CUDA_ERROR_NOT_READY;
  pool.discard();
  EXPECT_EQ(event.query(driver), CUDA_SUCCESS);
  EXPECT_EQ(g_queries, 0);
  event.release();
  EXPECT_EQ(take(), event_of(2));
}

}  // namespace
}  // namespace cushion
