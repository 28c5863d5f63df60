// Scopes around Cushion's own driver calls: whatever the driver refuses, the program's capture mode and current context
// are afterwards what they were.
#include "core/driver.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace cushion {
namespace {

CUstreamCaptureMode g_mode;
std::vector<CUcontext> g_current;  // the last is on top
int g_call;                        // of the functions below, in a test
int g_refused;                     // this one answers an error

bool refuse() { return ++g_call == g_refused; }

CUresult CUDAAPI exchange(CUstreamCaptureMode* mode) {
  if (refuse()) return CUDA_ERROR_UNKNOWN;
  std::swap(g_mode, *mode);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_current(CUcontext* context) {
  if (refuse()) return CUDA_ERROR_UNKNOWN;
  *context = g_current.back();
  return CUDA_SUCCESS;
}
CUresult CUDAAPI push(CUcontext context) {
  if (refuse()) return CUDA_ERROR_UNKNOWN;
  g_current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI pop(CUcontext*) {
  if (refuse()) return CUDA_ERROR_UNKNOWN;
  g_current.pop_back();
  return CUDA_SUCCESS;
}

// The call that is refused; 0: none.
class RefusedCall : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    g_mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    g_current = {mine};
    g_call = 0;
    g_refused = GetParam();
    driver.cuThreadExchangeStreamCaptureMode = exchange;
    driver.cuCtxGetCurrent = get_current;
    driver.cuCtxPushCurrent_v2 = push;
    driver.cuCtxPopCurrent_v2 = pop;
  }
  const CUcontext mine = reinterpret_cast<CUcontext>(0x10);
  const CUcontext other = reinterpret_cast<CUcontext>(0x20);
  Driver driver;
};

TEST_P(RefusedCall, LeavesTheProgramsCaptureMode) {
  {
    const RelaxedCaptureMode relaxed(driver);
    EXPECT_EQ(g_mode == CU_STREAM_CAPTURE_MODE_RELAXED, GetParam() != 1);
  }
  EXPECT_EQ(g_mode, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

TEST_P(RefusedCall, LeavesTheProgramsContextAndSaysWhichIsCurrent) {
  for (const CUcontext wanted : {mine, other}) {
    g_call = 0;
    {
      const CurrentContext current(driver, wanted);
      EXPECT_EQ(current.result() == CUDA_SUCCESS, g_current.back() == wanted);
      EXPECT_EQ(current.result() == CUDA_SUCCESS, GetParam() != 2 || wanted == mine);
    }
    EXPECT_EQ(g_current, std::vector{mine});
  }
}

INSTANTIATE_TEST_SUITE_P(Each, RefusedCall, testing::Range(0, 5));

}  // namespace
}  // namespace cushion
