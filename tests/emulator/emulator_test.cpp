// Holds the driver to the rules of the contract that Cushion rests on.
//
// It runs on the emulated driver in ctest, and by hand on a GPU (without LD_LIBRARY_PATH): a rule that fails here and
// holds there is a fault of the emulator, the other way round a wrong line in the contract.
#include <gtest/gtest.h>

#include "tests/harness/child.h"
#include "tests/harness/gpu.h"
#include "tests/harness/launch.h"

namespace {

using namespace harness;

class Memory : public GpuTest {};

TEST_F(Memory, ValuesOfAllocAndFree) {  // §2
  const Driver& cu = driver();
  CUdeviceptr p = 1;
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemAlloc(&p, 0));
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, cu.MemAlloc(&p, std::size_t{1} << 50));
  REQUIRE_CU(0, cu.MemAlloc(&p, 1000));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p + 512));
  CHECK_CU(0, cu.MemFree(p));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p));
}

TEST_F(Memory, FreeWaitsForEveryStreamOfItsContext) {  // §3
  const Driver& cu = driver();
  REQUIRE_CU(0, LoadKernels());
  Stream stream;
  DeviceBlock block(1 << 20);
  CHECK_CU(0, LaunchHold(stream, 20 * kMillisecond));
  Stopwatch watch;
  CHECK_CU(0, cu.MemFree(block.Release()));
  EXPECT_GE(watch.Milliseconds(), 19);
}

}  // namespace
