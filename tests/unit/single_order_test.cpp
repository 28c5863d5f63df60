// A single order: when a free may return before its wait, and who pays it.
#include "core/single_order.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

namespace cushion {
namespace {

// A driver of which only what is asked here exists.
struct Said {
  std::atomic<int> recorded{0};
  std::atomic<int> waited{0};
  std::atomic<bool> prints{false};
  std::atomic<CUresult> record_answers{CUDA_SUCCESS};
} g_said;

CUresult get_limit(std::size_t* size, CUlimit) {
  *size = 1 << 20;
  return CUDA_SUCCESS;
}
CUresult set_limit(CUlimit, std::size_t) { return g_said.prints ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult create(CUevent* event, unsigned) {
  static std::atomic<std::uintptr_t> last{0};
  *event = reinterpret_cast<CUevent>(++last);
  return CUDA_SUCCESS;
}
CUresult record(CUcontext, CUevent) {
  ++g_said.recorded;
  return g_said.record_answers;
}
CUresult wait(CUevent) {
  ++g_said.waited;
  return CUDA_SUCCESS;
}
CUresult current(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}

class SingleOrderTest : public testing::Test {
 protected:
  SingleOrderTest() {
    g_said.recorded = g_said.waited = 0;
    g_said.prints = false;
    g_said.record_answers = CUDA_SUCCESS;
    driver.cuCtxGetLimit = get_limit;
    driver.cuCtxSetLimit = set_limit;
    driver.cuEventCreate = create;
    driver.cuEventSynchronize = wait;
    driver.cuCtxRecordEvent = record;
    driver.cuCtxGetCurrent = current;
  }
  bool owe() { return order->owe(driver, gate, nullptr, events); }

  Driver driver;
  CaptureGate gate;
  EventPool events;
  std::unique_ptr<SingleOrder> order = std::make_unique<SingleOrder>();
};

TEST_F(SingleOrderTest, WhatIsOwedIsPaidOnceByWhoAsks) {
  EXPECT_TRUE(owe());
  EXPECT_TRUE(owe());  // the second wait is owed for both
  EXPECT_EQ(g_said.waited, 0);
  order->pay(driver);
  EXPECT_EQ(g_said.waited, 1);
  order->pay(driver);
  EXPECT_EQ(g_said.waited, 1);
  EXPECT_TRUE(order->holds());
}

TEST_F(SingleOrderTest, WhatEndsItPaysAndItNeverComesBack) {
  EXPECT_TRUE(owe());
  order->end(driver, "a second stream");
  EXPECT_EQ(g_said.waited, 1);
  EXPECT_FALSE(owe());
  order->end(driver, "something later");
  EXPECT_STREQ(order->ended_by(), "a second stream");
  EXPECT_EQ(g_said.recorded, 1);
}

TEST_F(SingleOrderTest, AFailingRecordOwesNothing) {
  g_said.record_answers = CUDA_ERROR_UNKNOWN;
  EXPECT_FALSE(owe());
  order->pay(driver);
  EXPECT_EQ(g_said.waited, 0);
}

TEST_F(SingleOrderTest, WhileACaptureIsOpenNothingIsOwed) {
  gate.begin();
  EXPECT_FALSE(owe());
  EXPECT_EQ(g_said.recorded, 0);
}

TEST_F(SingleOrderTest, AKernelThatPrintsEndsIt) {
  EXPECT_TRUE(owe());
  g_said.prints = true;
  EXPECT_FALSE(owe());
  EXPECT_EQ(g_said.waited, 1);
  EXPECT_STREQ(order->ended_by(), "a kernel that prints");
}

TEST_F(SingleOrderTest, OneThreadAndOneDeviceMayComeAgain) {
  order->thread_comes(driver, 7);
  order->thread_comes(driver, 7);
  order->device_comes(driver, 0);
  order->device_comes(driver, 0);
  EXPECT_TRUE(order->holds());
  order->device_comes(driver, 1);
  EXPECT_STREQ(order->ended_by(), "a second device");
}

TEST_F(SingleOrderTest, ASecondThreadEndsIt) {
  order->thread_comes(driver, 7);
  EXPECT_TRUE(owe());
  order->thread_comes(driver, 8);
  EXPECT_EQ(g_said.waited, 1);
  EXPECT_FALSE(order->holds());
}

TEST_F(SingleOrderTest, AResetIsWaitEnough) {
  EXPECT_TRUE(owe());
  order->forget();
  order->pay(driver);
  EXPECT_EQ(g_said.waited, 0);
}

// Of a free and a call that ends the order one sees the other, whichever comes first.
TEST_F(SingleOrderTest, AFreeAndAnEndThatRaceLeaveNothingUnpaid) {
  for (int i = 0; i < 2000; ++i) {
    order = std::make_unique<SingleOrder>();
    g_said.recorded = g_said.waited = 0;
    std::atomic<int> ready{0};
    bool owed = false;
    std::thread freeing([&] {
      for (++ready; ready < 2;) std::this_thread::yield();
      owed = owe();
    });
    std::thread ending([&] {
      for (++ready; ready < 2;) std::this_thread::yield();
      order->end(driver, "a second stream");
    });
    freeing.join();
    ending.join();
    if (owed) {
      ASSERT_GE(g_said.waited, 1) << "in round " << i;
    }
  }
}

}  // namespace
}  // namespace cushion
