// Contract §3, CUSHION_FREE=auto: cudaFree may return before its wait, where the program cannot tell. Each program runs
// in a process of its own, natively, under `sync` and under `auto`, and sees the same: after a free everything that was
// submitted before is over.
#include <thread>

#include "tests/contract/contract.h"

namespace {

using namespace contract;

constexpr CUstream legacy = nullptr;
constexpr std::size_t kSize = 64 * KiB;

// A block that the legacy stream writes once it was held for a while, and an unrelated one that is freed meanwhile.
struct Program {
  CUdeviceptr block = allocate(kSize);
  CUdeviceptr other = allocate(kSize);
  CUdeviceptr bad = allocate(sizeof(std::uint32_t));
  Event written{CU_EVENT_DEFAULT};

  Program() {
    fill(legacy, block, kSize, 1);
    CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(bad, 0, sizeof(std::uint32_t)));
    finish(legacy);
  }
  void write_and_free() {
    fill(legacy, block, kSize, 2, 60ms);
    CHECK_CU(CUDA_SUCCESS, driver().EventRecord(written, legacy));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(other));
  }
  // Whoever reads on `stream` from here on reads what was written.
  void expect_written(CUstream stream) {
    CHECK_CU(CUDA_SUCCESS, harness::LaunchCheck(stream, block, kSize, 2, bad));
    CHECK_CU(CUDA_SUCCESS, driver().StreamSynchronize(stream));
    std::uint32_t count = 0;
    CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoH(&count, bad, sizeof count));
    EXPECT_EQ(count, 0u);
  }
};

SCENARIO(auto_event_query) {
  Program program;
  program.write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().EventQuery(program.written));
}
SCENARIO(auto_stream_query) {
  Program program;
  program.write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().StreamQuery(legacy));
}
SCENARIO(auto_elapsed_time) {
  Program program;
  Event start(CU_EVENT_DEFAULT);
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(start, legacy));
  program.write_and_free();
  float ms = 0;
  CHECK_CU(CUDA_SUCCESS, driver().EventElapsedTime(&ms, start, program.written));
  EXPECT_GE(ms, 50);
}
SCENARIO(auto_second_stream) {
  Program program;
  program.write_and_free();
  const Stream stream;
  program.expect_written(stream);
}
SCENARIO(auto_stream_created_before) {
  Program program;
  const Stream stream;
  program.write_and_free();
  program.expect_written(stream);
}
SCENARIO(auto_second_thread) {
  Program program;
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  fill(CU_STREAM_PER_THREAD, program.block, kSize, 2, 60ms);  // this thread's
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(program.other));
  std::thread([&] {
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
    program.expect_written(CU_STREAM_PER_THREAD);  // that one's
  }).join();
}
SCENARIO(auto_second_context) {
  Program program;
  program.write_and_free();
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxCreate(&context, 0, 0));
  CUcontext popped = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxPopCurrent(&popped));
  CHECK_CU(CUDA_SUCCESS, driver().EventQuery(program.written));
  CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(context));
}
SCENARIO(auto_pinned_memory) {
  Program program;
  const SharedWord seen;
  program.write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoDAsync(seen.on_device(), program.block, 4, legacy));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(program.block));
  EXPECT_EQ(seen.Get(), 0x02020202u);
}
SCENARIO(auto_reset) {
  Program().write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxReset(0));
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
  Program again;
  again.write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().EventQuery(again.written));
}
// What is freed is handed out again at once, and written in its old owner's order.
SCENARIO(auto_chain) {
  Program program;
  for (int i = 0; i < 20; ++i) {
    const CUdeviceptr p = allocate(kSize);
    fill(legacy, p, kSize, static_cast<std::uint8_t>(i), 2ms);
    CHECK_CU(CUDA_SUCCESS, harness::LaunchCheck(legacy, p, kSize, static_cast<std::uint32_t>(i), program.bad));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  }
  program.write_and_free();
  program.expect_written(legacy);
}
SCENARIO(auto_prints) {
  Program program;
  CHECK_CU(CUDA_SUCCESS, harness::LaunchPrint(legacy, 1));
  program.write_and_free();
  CHECK_CU(CUDA_SUCCESS, driver().EventQuery(program.written));
}

struct Case {
  const char* scenario;
  int owed;              // frees that return before their wait
  const char* ended_by;  // what the report says ended the order
};
// Frees under `auto` until the order ends.
const Case kCases[] = {
    {"auto_event_query", 1, "nothing"},
    {"auto_stream_query", 1, "nothing"},
    {"auto_elapsed_time", 1, "nothing"},
    {"auto_second_stream", 1, "a second stream"},
    {"auto_stream_created_before", 0, "a second stream"},
    {"auto_second_thread", 1, "a second thread"},
    {"auto_second_context", 1, "a context of the program's"},
    {"auto_pinned_memory", 0, "pinned memory"},
    {"auto_reset", 2, "nothing"},
    {"auto_chain", 21, "nothing"},
    {"auto_prints", 0, "a kernel that prints"},
};

class AutoPrograms : public Contract, public testing::WithParamInterface<Case> {};
INSTANTIATE_TEST_SUITE_P(Each, AutoPrograms, testing::ValuesIn(kCases),
                         [](const auto& parameter) { return std::string(parameter.param.scenario); });

TEST_P(AutoPrograms, SeesWhatItSeesNatively) {
  if (deferred()) GTEST_SKIP() << "CUSHION_FREE=deferred gives up the wait of cuMemFree";
  EXPECT_SCENARIO(GetParam().scenario);
}

TEST_P(AutoPrograms, SeesTheSameUnderAuto) {
  if (!under_cushion() || !pooled()) GTEST_SKIP() << "CUSHION_FREE=auto is the pool's";
  const Scratch scratch;
  EXPECT_SCENARIO(GetParam().scenario, {"CUSHION_FREE=auto", "CUSHION_REPORT=" + scratch.path("report.json")});
  const nlohmann::json report = scratch.report("report.json");
  ASSERT_FALSE(report.is_null());
  const int owed = report["calls"]["free_waits_owed"];
  const std::string ended_by = report["single_order_ended_by"];
  if (ended_by == "pageable memory access" || ended_by == "a driver before 12.5" || ended_by == "CUSHION_BACKING=vmm") {
    EXPECT_EQ(owed, 0);
    GTEST_SKIP() << "no free returns early here: " << ended_by;
  }
  EXPECT_EQ(owed, GetParam().owed);
  EXPECT_EQ(ended_by, GetParam().ended_by);
}

}  // namespace
