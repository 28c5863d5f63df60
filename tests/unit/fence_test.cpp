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

TEST(FenceSet, EveryFreeTakesALaterStamp) {
  FenceSet set;
  EXPECT_EQ(set.stamp(), 0u);
  EXPECT_EQ(set.next_stamp(), 1u);
  EXPECT_EQ(set.next_stamp(), 2u);
  EXPECT_EQ(set.stamp(), 2u);
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
  Fence* oldest = set.claim();
  ASSERT_NE(oldest, nullptr);
  set.finish(oldest->id, true);
  EXPECT_TRUE(set.wants_fence(1'000));
}

TEST(FenceSet, TheOldestIsAskedFirstAndByOneThreadAtATime) {
  FenceSet set;
  EXPECT_EQ(set.claim(), nullptr);
  set.add(fence(4));
  set.add(fence(9));
  Fence* first = set.claim();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->stamp, 4u);
  const std::uint64_t first_id = first->id;
  Fence* second = set.claim();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->stamp, 9u);
  EXPECT_NE(second->id, first_id);
  EXPECT_EQ(set.claim(), nullptr);
  set.finish(first_id, false);
  ASSERT_NE(set.claim(), nullptr);
}

TEST(FenceSet, AFenceThatIsNotCompleteCleansNothing) {
  FenceSet set;
  set.add(fence(4));
  EXPECT_TRUE(set.finish(set.claim()->id, false).empty());
  EXPECT_EQ(set.clean_through(), 0u);
  EXPECT_FALSE(set.wants_fence(4));
}

TEST(FenceSet, ACompleteFenceCleansItsStampAndGivesItsEventsBack) {
  FenceSet set;
  Fence f = fence(4);
  f.events.resize(2);
  set.add(std::move(f));
  EXPECT_EQ(set.finish(set.claim()->id, true).size(), 2u);
  EXPECT_EQ(set.clean_through(), 4u);
  EXPECT_EQ(set.claim(), nullptr);
}

TEST(FenceSet, FencesMayCompleteOutOfOrder) {
  FenceSet set;
  set.add(fence(4));
  set.add(fence(9));
  const std::uint64_t first = set.claim()->id;
  const std::uint64_t second = set.claim()->id;
  set.finish(second, true);
  EXPECT_EQ(set.clean_through(), 9u);
  set.finish(first, true);
  EXPECT_EQ(set.clean_through(), 9u);
  EXPECT_EQ(set.claim(), nullptr);
}

TEST(FenceSet, AFenceThatIsGoneIsFinishedInVain) {
  FenceSet set;
  set.add(fence(4));
  const std::uint64_t id = set.claim()->id;
  set.abandon();
  set.next_stamp();
  EXPECT_TRUE(set.finish(id, true).empty());
  EXPECT_EQ(set.clean_through(), 0u);
}

TEST(FenceSet, AnAbandonedSetOwesNothingAndItsStampsGoOn) {
  FenceSet set;
  set.next_stamp();
  set.next_stamp();
  set.add(fence(1));
  set.abandon();
  EXPECT_EQ(set.claim(), nullptr);
  EXPECT_EQ(set.clean_through(), 2u);
  EXPECT_EQ(set.next_stamp(), 3u);
  EXPECT_TRUE(set.wants_fence(3));
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
