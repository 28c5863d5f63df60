// Every driver call of core's may fail, at every count: no block is then in two hands, nothing is lost, and the program
// is told what the driver said (contract §3 and §6). The emulated driver fails the calls (EMU_FAIL).
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/harness/child.h"
#include "tests/unit/context_fixture.h"

namespace cushion {
namespace {

using harness::driver;

struct Fault {
  const char* function;  // ELF name
  int code;
  int call;  // fails this one and no other

  std::string Plan(char separator) const {
    return std::string(function) + separator + std::to_string(call) + separator + std::to_string(code);
  }
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.Plan(':'); }

// The first calls of every function that core calls. (The workload itself creates two streams before.)
std::vector<Fault> Faults() {
  struct Calls {
    const char* function;
    int code;
    int first;
    int last;
  };
  std::vector<Fault> faults;
  for (const auto& [function, code, first, last] :
       {Calls{"cuMemAlloc_v2", 2, 1, 4}, Calls{"cuMemAlloc_v2", 999, 1, 4}, Calls{"cuMemFree_v2", 999, 1, 2},
        Calls{"cuMemGetInfo_v2", 999, 1, 3}, Calls{"cuEventCreate", 2, 1, 6}, Calls{"cuEventRecord", 999, 1, 6},
        Calls{"cuEventQuery", 999, 1, 12}, Calls{"cuEventSynchronize", 999, 1, 6},
        Calls{"cuCtxRecordEvent", 800, 1, 12}, Calls{"cuStreamWaitEvent", 999, 1, 3},
        Calls{"cuMemsetD8Async", 999, 1, 3}, Calls{"cuStreamCreate", 2, 3, 3}}) {
    for (int call = first; call <= last; ++call) faults.push_back({function, code, call});
  }
  return faults;
}

// Fills the pool, frees one block behind a closed gate and asks for it on another stream.
void TakeByStreamWait(Core& core, const TestStream& from, const TestStream& to) {
  Gate gate;
  std::vector<CUdeviceptr> blocks;
  while (const CUdeviceptr p = core.MallocAsync(100'000, from)) blocks.push_back(p);
  gate.Hold(from);
  const auto free = [&](CUdeviceptr p, const TestStream& lane) {
    if (core.FreeAsync(p, lane) == CUDA_SUCCESS) return;
    CHECK_CU(0, core.FreeAsync(p, lane));
  };
  if (!blocks.empty()) {
    free(blocks.back(), from);
    blocks.pop_back();
    if (const CUdeviceptr p = core.MallocAsync(100'000, to)) free(p, to);
  }
  for (const CUdeviceptr p : blocks) free(p, from);
}

// A device of 6 MiB, as Cushion's own calls see it.
class SmallDevice {
 public:
  explicit SmallDevice(Driver& driver) {
    s_alloc = driver.cuMemAlloc_v2;
    s_free = driver.cuMemFree_v2;
    s_blocks.clear();
    driver.cuMemAlloc_v2 = [](CUdeviceptr* p, std::size_t bytes) {
      std::size_t held = bytes;
      for (const auto& block : s_blocks) held += block.second;
      if (held > 6 * kMiB) return CUDA_ERROR_OUT_OF_MEMORY;
      const CUresult result = s_alloc(p, bytes);
      if (result == CUDA_SUCCESS) s_blocks[*p] = bytes;
      return result;
    };
    driver.cuMemFree_v2 = [](CUdeviceptr p) {
      const CUresult result = s_free(p);
      if (result == CUDA_SUCCESS) s_blocks.erase(p);
      return result;
    };
  }

 private:
  static inline decltype(Driver::cuMemAlloc_v2) s_alloc = nullptr;
  static inline decltype(Driver::cuMemFree_v2) s_free = nullptr;
  static inline std::map<CUdeviceptr, std::size_t> s_blocks;
};

// A program whose memory is short, over two streams. One call of the driver's fails somewhere in it.
int Workload() {
  const harness::Gpu gpu;
  CHECK_CU(0, harness::LoadKernels());
  Core core;
  core.options().oom_wait = {};
  core.options().init = InitMode::junk;
  core.context();
  const SmallDevice small(core.shared.driver);
  harness::SharedWord bad;
  {
    TestStream lanes[2];
    struct Held {
      CUdeviceptr address;
      int lane;  // -1: host-ordered
    };
    std::vector<Held> live;
    int refused = 0;
    std::mt19937 random(7);
    const auto free = [&](const Held& h, bool async) {
      return async ? core.FreeAsync(h.address, lanes[h.lane]) : core.Free(h.address);
    };
    for (unsigned step = 0; step < 400; ++step) {
      if (step % 100 == 50) TakeByStreamWait(core, lanes[0], lanes[1]);
      if (random() % 2 == 0) {
        const int lane = static_cast<int>(random() % 3) - 1;
        const std::uint64_t bytes = 4096 + random() % (random() % 3 == 0 ? 2 * kMiB : 100'000);
        const CUdeviceptr p = lane < 0 ? core.Malloc(bytes) : core.MallocAsync(bytes, lanes[lane]);
        if (p == 0) continue;
        CHECK_CU(0, harness::LaunchFillHoldCheck(lanes[std::max(lane, 0)], p, 4096, step, 20'000, bad.on_device()));
        live.push_back({p, lane});
      } else if (!live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        const Held h = live.back();
        live.pop_back();
        const bool async = h.lane >= 0 && random() % 4 != 0;
        if (free(h, async) == CUDA_SUCCESS) continue;
        ++refused;
        CHECK_CU(0, free(h, async));  // the block stayed live
      }
      if (step % 50 == 49) core.context().relieve(0);
    }
    for (const Held& h : live) {
      if (core.Free(h.address) == CUDA_SUCCESS) continue;
      ++refused;
      CHECK_CU(0, core.Free(h.address));
    }
    EXPECT_LE(refused, 1);
    EXPECT_GT(core.shared.counters.stream_waits, 0u) << "the workload has lost its pressure";
  }
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(bad.Get(), 0u);
  EXPECT_TRUE(core.valid());
  EXPECT_EQ(core.usage().requested.current(), 0u);
  EXPECT_EQ(core.usage().handed_out.current(), 0u);
  EXPECT_EQ(core.usage().held.current(), core.held());
  for (int i = 0; i < 3 && core.held() != 0; ++i) core.context().relieve(1'000 * harness::kMillisecond);
  EXPECT_EQ(core.held(), 0u);
  return testing::Test::HasFailure() ? 1 : 0;
}

// A segment that the driver would not take back counts as held, is handed out to nobody, and goes back later.
int KeepWhatIsRefused() {
  const harness::Gpu gpu;
  Core core;
  const CUdeviceptr p = core.Malloc(kSegment);
  CHECK_CU(0, core.Free(p));
  const std::uint64_t held = core.held();
  EXPECT_GE(held, kSegment);
  EXPECT_EQ(core.context().relieve(0), held / kSegment - 1);
  EXPECT_EQ(core.held(), kSegment);
  EXPECT_EQ(core.context().unused(), 0u);
  EXPECT_TRUE(core.valid());
  EXPECT_EQ(core.context().relieve(0), 1u);
  EXPECT_EQ(core.held(), 0u);
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(ContextRefused, WhatTheDriverWillNotTakeBackStaysHeld) {
  if (!harness::Driver::Emulated()) GTEST_SKIP() << "only the emulated driver fails on request";
  const harness::ChildResult result =
      harness::RunChild("refused", KeepWhatIsRefused, {{"EMU_FAIL", "cuMemFree_v2:1:999"}});
  EXPECT_EQ(result.status, 0) << result.output;
}

class ContextFaultTest : public testing::TestWithParam<Fault> {};

TEST_P(ContextFaultTest, NothingIsLostAndNoBlockIsInTwoHands) {
  if (!harness::Driver::Emulated()) GTEST_SKIP() << "only the emulated driver fails on request";
  const harness::ChildResult result = harness::RunChild("fault", Workload, {{"EMU_FAIL", GetParam().Plan(':')}});
  EXPECT_EQ(result.status, 0) << result.output;
}

INSTANTIATE_TEST_SUITE_P(Calls, ContextFaultTest, testing::ValuesIn(Faults()),
                         [](const auto& named) { return named.param.Plan('_'); });

}  // namespace
}  // namespace cushion
