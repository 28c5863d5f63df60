// Contract §5, processes: fork, exec, every way to end, other processes' memory, other contexts and devices.
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "tests/contract/contract.h"

extern char** environ;

namespace {

using namespace contract;

class Process : public Contract {};

#define SKIP_WITHOUT_CUSHION() \
  if (!under_cushion()) GTEST_SKIP() << "the report is Cushion's"

std::string report_option(const Scratch& scratch) { return "CUSHION_REPORT=" + scratch.path("report.json"); }

bool report_exists() {
  return std::getenv("CUSHION_REPORT") != nullptr && access(std::getenv("CUSHION_REPORT"), F_OK) == 0;
}

// Of a signal that killed it: -signal.
int exit_code(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// --- Every way to end ----------------------------------------------------------------------------------------

// Leaves three blocks of 1000 bytes behind, having had 2 MiB more.
void leave_blocks() {
  for (int i = 0; i < 3; ++i) allocate(1000);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(2 * MiB)));
}

SCENARIO(ends_by_return) { leave_blocks(); }
SCENARIO(ends_by_exit) { leave_blocks(), std::exit(9); }
SCENARIO(ends_by__exit) { leave_blocks(), _exit(8); }
SCENARIO(ends_by__Exit) { leave_blocks(), std::_Exit(6); }
SCENARIO(ends_by_quick_exit) { leave_blocks(), std::quick_exit(7); }
SCENARIO(ends_by_exception) { leave_blocks(), throw std::runtime_error("uncaught"); }
SCENARIO(ends_by_abort) { leave_blocks(), std::abort(); }
SCENARIO(ends_by_sigsegv) { leave_blocks(), raise(SIGSEGV); }
SCENARIO(ends_by_fault) {
  leave_blocks();
  *static_cast<volatile int*>(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) = 1;
}
SCENARIO(ends_by_sigterm) { leave_blocks(), raise(SIGTERM); }
SCENARIO(ends_by_sigint) { leave_blocks(), raise(SIGINT); }

void expect_report(const nlohmann::json& report, pid_t pid) {
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(report["schema"], "cushion-report");
  EXPECT_EQ(report["version"], 1);
  EXPECT_EQ(report["program"]["pid"], pid);
  EXPECT_EQ(report["program"]["name"], "contract_tests");
  const char* free = std::getenv("CUSHION_FREE");
  EXPECT_EQ(report["options"]["FREE"], free != nullptr ? free : "sync");
  EXPECT_GE(report["calls"]["served"].get<int>(), 4);
  const nlohmann::json& device = report["devices"][0];
  EXPECT_EQ(device["requested"]["current"], 3000);
  EXPECT_EQ(device["requested"]["peak"], 3000 + 2 * MiB);
  for (const char* at : {"current", "peak"}) {
    if (!pooled()) break;  // how much more the driver's pool takes is not known
    EXPECT_GE(device["handed_out"][at].get<std::size_t>(), device["requested"][at].get<std::size_t>());
    EXPECT_GE(device["held"][at].get<std::size_t>(), device["handed_out"][at].get<std::size_t>());
  }
  std::size_t live = 0;
  for (const nlohmann::json& row : report["live"]) {
    EXPECT_EQ(row["size"], 1000);
    live += row["count"].get<std::size_t>();
  }
  EXPECT_EQ(live, 3U);
}

struct End {
  const char* scenario;
  int code, signal;  // signal 0: it exits
};

class ProcessEnd : public Contract, public testing::WithParamInterface<End> {};

// A sanitizer's options under which faults are left to the process.
std::string leaves_faults(const std::string& variable) {
  const char* options = std::getenv(variable.c_str());
  return variable + "=" + (options != nullptr ? std::string(options) + ":" : "") + "handle_segv=0";
}

TEST_P(ProcessEnd, EndsAsNativelyAndWritesItsReport) {
  const auto& [scenario, code, signal] = GetParam();
  const Scratch scratch;
  const Outcome outcome =
      run_scenario(scenario, {report_option(scratch), leaves_faults("ASAN_OPTIONS"), leaves_faults("TSAN_OPTIONS")});
  EXPECT_TRUE(signal != 0 ? outcome.killed(signal) : outcome.exited(code)) << outcome;
  if (under_cushion()) {
    EXPECT_EQ(scratch.files(), std::vector<std::string>{"report.json"});
    expect_report(scratch.report("report.json"), outcome.pid);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, ProcessEnd,
                         testing::Values(End{"ends_by_return", 0, 0}, End{"ends_by_exit", 9, 0},
                                         End{"ends_by__exit", 8, 0}, End{"ends_by__Exit", 6, 0},
                                         End{"ends_by_quick_exit", 7, 0}, End{"ends_by_exception", 0, SIGABRT},
                                         End{"ends_by_abort", 0, SIGABRT}, End{"ends_by_sigsegv", 0, SIGSEGV},
                                         End{"ends_by_fault", 0, SIGSEGV}, End{"ends_by_sigterm", 0, SIGTERM},
                                         End{"ends_by_sigint", 0, SIGINT}),
                         [](const auto& end) { return std::string(end.param.scenario); });

// With native CUDA below, the report still knows peaks and leaks.
SCENARIO(leaves_blocks_of_both_kinds) {
  const Stream stream;
  leave_blocks();
  allocate_async(500, stream);
}

TEST_F(Process, AllocatorCudaReportsPeaksAndLeaks) {
  SKIP_WITHOUT_CUSHION();
  const Scratch scratch;
  EXPECT_SCENARIO("leaves_blocks_of_both_kinds",
                  {report_option(scratch), "CUSHION_ALLOCATOR=cuda", "CUSHION_TRACK=on"});
  const nlohmann::json report = scratch.report("report.json");
  ASSERT_FALSE(report.is_null());
  EXPECT_EQ(report["calls"]["served"], 0);
  EXPECT_EQ(report["calls"]["by_function"]["cuMemAlloc"]["forwarded"], 4);
  EXPECT_EQ(report["calls"]["by_function"]["cuMemAllocAsync"]["forwarded"], 1);
  EXPECT_EQ(report["calls"]["frees_forwarded"], 1);
  const nlohmann::json& device = report["devices"][0];
  EXPECT_EQ(device["forwarded"]["current"], 3500);
  EXPECT_EQ(device["forwarded"]["peak"], 3000 + 2 * MiB);
  EXPECT_EQ(device["held"]["peak"], 0);
  ASSERT_EQ(report["live"].size(), 2U);
  for (const nlohmann::json& row : report["live"]) {
    const bool sync = row["api"] == "cuMemAlloc";
    EXPECT_EQ(row["size"], sync ? 1000 : 500);
    EXPECT_EQ(row["count"], sync ? 3 : 1);
    EXPECT_EQ(row["stream"].is_null(), sync) << "null: host-ordered";
    EXPECT_EQ(row["served_by"], "driver");
    EXPECT_TRUE(row["oldest_age_s"].is_number());
  }
}

// A program's own signal handler, set before or after the first allocation, stays the only one.
SCENARIO(has_a_signal_handler) {
  struct sigaction mine {};
  mine.sa_handler = [](int) { _exit(42); };
  EXPECT_EQ(sigaction(SIGSEGV, &mine, nullptr), 0);
  leave_blocks();
  struct sigaction now {};
  EXPECT_EQ(sigaction(SIGSEGV, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, mine.sa_handler);
  EXPECT_EQ(sigaction(SIGTERM, &mine, nullptr), 0);
  raise(expectations_failed() ? SIGKILL : SIGTERM);
}

TEST_F(Process, AProgramsSignalHandlerStays) {
  const Scratch scratch;
  const Outcome outcome = run_scenario("has_a_signal_handler", {report_option(scratch)});
  EXPECT_TRUE(outcome.exited(42)) << outcome;
  if (under_cushion()) expect_report(scratch.report("report.json"), outcome.pid);
}

// A crash handler that has its say and leaves the rest to the handler that it found.
struct sigaction found_handler {};
SCENARIO(chains_to_the_handler_it_found) {
  leave_blocks();
  struct sigaction mine {};
  mine.sa_sigaction = [](int number, siginfo_t* info, void* context) {
    if (write(STDOUT_FILENO, "mine\n", 5) != 5) _exit(43);
    if ((found_handler.sa_flags & SA_SIGINFO) != 0) return found_handler.sa_sigaction(number, info, context);
    sigaction(number, &found_handler, nullptr);
    raise(number);
  };
  mine.sa_flags = SA_SIGINFO;
  EXPECT_EQ(sigaction(SIGTERM, &mine, &found_handler), 0);
  raise(expectations_failed() ? SIGKILL : SIGTERM);
}

TEST_F(Process, ACrashHandlerMayChain) {
  const Scratch scratch;
  const Outcome outcome = run_scenario("chains_to_the_handler_it_found", {report_option(scratch)});
  EXPECT_TRUE(outcome.killed(SIGTERM)) << outcome;
  EXPECT_EQ(outcome.out, "mine\n");
  if (under_cushion()) expect_report(scratch.report("report.json"), outcome.pid);
}

// abort() with the program's own handler, which may leave by another way.
SCENARIO(catches_abort) {
  struct sigaction mine {};
  mine.sa_handler = [](int) { _exit(44); };
  leave_blocks();
  EXPECT_EQ(sigaction(SIGABRT, &mine, nullptr), 0);
  std::abort();
}

TEST_F(Process, AProgramMayCatchItsAbort) {
  const Scratch scratch;
  const Outcome outcome = run_scenario("catches_abort", {report_option(scratch)});
  EXPECT_TRUE(outcome.exited(44)) << outcome;
  if (under_cushion()) expect_report(scratch.report("report.json"), outcome.pid);
}

// An ignored signal stays ignored.
SCENARIO(ignores_sigterm) {
  EXPECT_NE(std::signal(SIGTERM, SIG_IGN), SIG_ERR);
  leave_blocks();
  raise(SIGTERM);
}

TEST_F(Process, AnIgnoredSignalStaysIgnored) { EXPECT_SCENARIO("ignores_sigterm"); }

// --- Silence -------------------------------------------------------------------------------------------------

SCENARIO_WITHOUT_CONTEXT(touches_nothing) {}
SCENARIO(allocates_nothing) {
  const Stream stream;
  hold(stream, 1ms);
  finish(stream);
}

TEST_F(Process, AProgramThatAllocatesNothingIsSilent) {
  for (const char* scenario : {"touches_nothing", "allocates_nothing"}) {
    const Scratch scratch;
    const Outcome outcome =
        run_scenario(scenario, {report_option(scratch), "CUSHION_TRACK=on", "CUSHION_ALLOCATOR=nonsense"});
    EXPECT_TRUE(outcome.exited(0)) << outcome;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err, "");
    EXPECT_TRUE(scratch.files().empty());
  }
}

SCENARIO(runs_natively) {
  const CUdeviceptr p = allocate(1000);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemGetAddressRange(&base, &size, p));
  EXPECT_EQ(base, p);
  EXPECT_EQ(size, 1000U) << "the driver's own block, not one of a pool";
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Process, ABadOptionIsOneLineAndNativeCuda) {
  SKIP_WITHOUT_CUSHION();
  // Without the options that this process has: others may be complained about, too.
  const Outcome outcome = run_scenario("runs_natively", {"CUSHION_", "CUSHION_FREE=nonsense"});
  EXPECT_TRUE(outcome.exited(0)) << outcome;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome;
  for (const char* word : {"CUSHION_FREE", "nonsense", "sync", "deferred"}) {
    EXPECT_NE(outcome.err.find(word), std::string::npos) << outcome;
  }
}

TEST_F(Process, DisabledMeansNative) {
  const Outcome outcome = run_scenario("runs_natively", {"CUSHION_DISABLE=1", "CUSHION_FREE=sync"});
  EXPECT_TRUE(outcome.exited(0)) << outcome;
  EXPECT_EQ(outcome.err, "");
}

// --- Children ------------------------------------------------------------------------------------------------

// CUDA does not survive fork: natively the child's calls answer 3. The parent goes on undisturbed.
SCENARIO(forks_after_allocating) {
  leave_blocks();
  const CUdeviceptr p = allocate(MiB);
  const pid_t child = fork();
  if (child == 0) {
    CUdeviceptr q = 0;
    CHECK_CU(CUDA_ERROR_NOT_INITIALIZED, driver().MemFree(p));
    CHECK_CU(CUDA_ERROR_NOT_INITIALIZED, driver().MemAlloc(&q, MiB));
    std::exit(expectations_failed() ? 1 : 33);
  }
  EXPECT_EQ(exit_code(child), 33);
  EXPECT_FALSE(report_exists());
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p, 1, MiB));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Process, AForkedChildIsLeftAlone) {
  const Scratch scratch;
  EXPECT_SCENARIO("forks_after_allocating", {report_option(scratch)});
  if (under_cushion()) {
    EXPECT_EQ(scratch.files().size(), 1U);
  }
}

// While other threads allocate and free all the time, so that some lock is likely held at a fork.
void fork_beside_threads(int rounds) {
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      while (!stop) CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(64 * KiB)));
    });
  }
  for (int round = 0; round < rounds; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      CUdeviceptr p = 0;
      _exit(driver().MemAlloc(&p, 64 * KiB) == CUDA_SUCCESS ? 1 : 33);
    }
    EXPECT_EQ(exit_code(child), 33);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

SCENARIO(forks_while_threads_allocate) {
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(KiB)));  // Cushion has begun
  fork_beside_threads(20);
}
SCENARIO(forks_while_threads_begin) { fork_beside_threads(3); }

TEST_F(Process, AForkedChildHoldsNoLock) {
  if (!under_cushion()) GTEST_SKIP() << "the driver's own locks at a fork are its own matter";
  EXPECT_SCENARIO("forks_while_threads_allocate");
}

// The first allocation looks the driver up by the loader, whose lock fork knows how to give the child.
TEST_F(Process, AForkedChildHoldsNoLockOfAFirstAllocation) {
  if (!under_cushion()) GTEST_SKIP() << "the driver's own locks at a fork are its own matter";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's runtime has a lock in dlopen that the child would wait for";
#endif
  for (int process = 0; process < 5; ++process) EXPECT_SCENARIO("forks_while_threads_begin");
}

SCENARIO_WITHOUT_CONTEXT(forks_before_cuda) {
  const pid_t child = fork();
  use_primary_context();
  leave_blocks();
  if (child == 0) std::exit(expectations_failed() ? 1 : 33);
  EXPECT_EQ(exit_code(child), 33);
}

TEST_F(Process, AChildForkedEarlierIsAnOrdinaryProcess) {
  const Scratch scratch;
  EXPECT_SCENARIO("forks_before_cuda", {report_option(scratch)});
  if (under_cushion()) {
    EXPECT_EQ(scratch.files().size(), 2U) << "the second process appends its pid";
  }
}

SCENARIO(vforks) {
  leave_blocks();
  const pid_t child = vfork();
  if (child == 0) _exit(33);
  EXPECT_EQ(exit_code(child), 33);
  EXPECT_FALSE(report_exists());
}

TEST_F(Process, AVforkedChildWritesNoReport) {
  const Scratch scratch;
  const Outcome outcome = run_scenario("vforks", {report_option(scratch)});
  EXPECT_TRUE(outcome.exited(0)) << outcome;
  if (under_cushion()) expect_report(scratch.report("report.json"), outcome.pid);
}

// Runs this program again, which inherits LD_PRELOAD.
int spawn_scenario(const char* name) {
  const std::string option = std::string("--scenario=") + name;
  std::string program = "/proc/self/exe", argument = option;
  char* const arguments[] = {program.data(), argument.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0);
  return exit_code(child);
}

SCENARIO(spawns_silent_child) {
  leave_blocks();
  EXPECT_EQ(spawn_scenario("touches_nothing"), 0);
  EXPECT_EQ(spawn_scenario("allocates_nothing"), 0);
  EXPECT_FALSE(report_exists());
}

SCENARIO(spawns_allocating_child) {
  leave_blocks();
  EXPECT_EQ(spawn_scenario("ends_by_exit"), 9);
}

TEST_F(Process, ASpawnedChildIsSilentUntilItAllocates) {
  const Scratch silent, allocating;
  EXPECT_SCENARIO("spawns_silent_child", {report_option(silent)});
  EXPECT_SCENARIO("spawns_allocating_child", {report_option(allocating)});
  if (!under_cushion()) return;
  EXPECT_EQ(silent.files().size(), 1U);
  EXPECT_EQ(allocating.files().size(), 2U);
}

// --- Other processes' memory -----------------------------------------------------------------------------------

// Memory of another process: opened by the handle in IPC_HANDLE, whose block holds IPC_EXPECT; answers and writes the
// next value. Twice at once, as programs do that open each tensor.
SCENARIO(opens_a_handle) {
  CUipcMemHandle handle{};
  const char* const text = std::getenv("IPC_HANDLE");
  for (std::size_t i = 0; i < sizeof handle.reserved; ++i) {
    unsigned byte = 0;
    std::sscanf(text + 2 * i, "%2x", &byte);
    handle.reserved[i] = static_cast<char>(byte);
  }
  const auto expected = static_cast<unsigned char>(std::atoi(std::getenv("IPC_EXPECT")));
  CUdeviceptr p = 0, again = 0, base = 0;
  std::size_t size = 0;
  const CUresult result = driver().IpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS) std::exit(77);
  CHECK_CU(CUDA_SUCCESS, driver().IpcOpenMemHandle(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT_EQ(p, again);
  CHECK_CU(CUDA_SUCCESS, driver().MemGetAddressRange(&base, &size, p + 5));
  EXPECT_EQ(base, p);
  EXPECT_EQ(size, 3 * MiB + 5);
  std::vector<unsigned char> bytes(size);
  CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoH(bytes.data(), p, bytes.size()));
  EXPECT_TRUE(all_are(bytes, expected));
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p, static_cast<unsigned char>(expected + 1), bytes.size()));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().IpcCloseMemHandle(p));
  CHECK_CU(CUDA_SUCCESS, driver().IpcCloseMemHandle(again));
  EXPECT_NE(driver().IpcCloseMemHandle(p), CUDA_SUCCESS);
}

std::string hexadecimal(const CUipcMemHandle& handle) {
  std::string text;
  char digits[3];
  for (const char byte : handle.reserved) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

bool shares_memory() {
  const char* const backing = std::getenv("CUSHION_BACKING");
  const char* const allocator = std::getenv("CUSHION_ALLOCATOR");
  return !under_cushion() || ((backing == nullptr || std::string_view(backing) != "vmm") &&
                              (allocator == nullptr || std::string_view(allocator) != "async"));
}

// The block between two others of the same segment, opened by a process that is served, and by one that is not: the
// block's own bytes, or an error.
TEST_F(Process, AnIpcHandleOpensTheBlockOrNothing) {
  const std::size_t size = 3 * MiB + 5;
  const CUdeviceptr blocks[] = {allocate(size), allocate(size), allocate(size)};
  unsigned char value = 10;
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p, value++, size));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  CUipcMemHandle handle{}, same{}, other{};
  if (!shares_memory()) {
    EXPECT_NE(driver().IpcGetMemHandle(&handle, blocks[1]), CUDA_SUCCESS);
  } else {
    CHECK_CU(CUDA_SUCCESS, driver().IpcGetMemHandle(&handle, blocks[1]));
    CHECK_CU(CUDA_SUCCESS, driver().IpcGetMemHandle(&same, blocks[1] + 4096));
    CHECK_CU(CUDA_SUCCESS, driver().IpcGetMemHandle(&other, blocks[2]));
    EXPECT_EQ(hexadecimal(handle), hexadecimal(same));
    EXPECT_NE(hexadecimal(handle), hexadecimal(other));
    CUdeviceptr mine = 0;
    EXPECT_NE(driver().IpcOpenMemHandle(&mine, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_SUCCESS) << "my own";
    EXPECT_SCENARIO("opens_a_handle", {"IPC_HANDLE=" + hexadecimal(handle), "IPC_EXPECT=11"});
    constexpr unsigned char kNow[] = {10, 12, 12};
    for (std::size_t i = 0; i < std::size(blocks); ++i) {
      std::vector<unsigned char> bytes(size);
      CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoH(bytes.data(), blocks[i], size));
      EXPECT_TRUE(all_are(bytes, kNow[i])) << i;
    }
    if (under_cushion() && pooled()) {
      const Outcome unserved =
          run_scenario("opens_a_handle", {"IPC_HANDLE=" + hexadecimal(handle), "IPC_EXPECT=12", "CUSHION_DISABLE=1"});
      EXPECT_TRUE(unserved.exited(77)) << unserved;
    }
  }
  if (shares_memory()) {  // a free that fails leaves the block, and its handle
    Stream stream;
    CUgraph graph = nullptr;
    CHECK_CU(CUDA_SUCCESS, driver().StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(blocks[1], stream));
    CHECK_CU(CUDA_SUCCESS, driver().StreamEndCapture(stream, &graph));
    CHECK_CU(CUDA_SUCCESS, driver().GraphDestroy(graph));
    CHECK_CU(CUDA_SUCCESS, driver().IpcGetMemHandle(&same, blocks[1]));
    EXPECT_EQ(hexadecimal(handle), hexadecimal(same));
    EXPECT_SCENARIO("opens_a_handle", {"IPC_HANDLE=" + hexadecimal(handle), "IPC_EXPECT=12"});
  }
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  if (under_cushion() && shares_memory() && pooled()) {
    const Outcome freed = run_scenario("opens_a_handle", {"IPC_HANDLE=" + hexadecimal(handle), "IPC_EXPECT=12"});
    EXPECT_TRUE(freed.exited(77)) << freed;
    EXPECT_NE(freed.err.find("its block was freed"), std::string::npos) << freed;
  }
}

// The device's reset takes the block along, and its handle.
SCENARIO(exports_and_resets) {
  const CUdeviceptr p = allocate(3 * MiB + 5);
  CUipcMemHandle handle{};
  CHECK_CU(CUDA_SUCCESS, driver().IpcGetMemHandle(&handle, p));
  CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxReset(0));
  const Outcome gone = run_scenario("opens_a_handle", {"IPC_HANDLE=" + hexadecimal(handle), "IPC_EXPECT=0"});
  EXPECT_TRUE(gone.exited(77)) << gone;
}

TEST_F(Process, AnIpcHandleEndsWithItsContext) {
  if (!shares_memory() || !pooled()) GTEST_SKIP() << "the driver's own handles are its own matter";
  EXPECT_SCENARIO("exports_and_resets");
}

TEST_F(Process, TheIpcCapableAttribute) {
  const Stream stream;
  const CUdeviceptr sync = allocate(MiB), async = allocate_async(MiB, stream);
  for (const auto& [p, native] : {std::pair{sync, 1}, std::pair{async, 0}}) {
    const int expected = shares_memory() ? native : 0;
    int one = -1;
    CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttribute(&one, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
    EXPECT_EQ(one, expected);
    int several = -1;
    CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    void* data = &several;
    CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttributes(1, &attribute, &data, p));
    EXPECT_EQ(several, expected);
  }
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(sync));
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(async, stream));
}

// --- Several contexts and devices --------------------------------------------------------------------------------

// An allocation belongs to its stream's context, whatever is current: it lives and dies with that.
TEST_F(Process, AnAsyncAllocationBelongsToItsStreamsContext) {
  CUcontext primary = nullptr, other = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&primary));
  CHECK_CU(CUDA_SUCCESS, driver().CtxCreate(&other, 0, 0));
  for (int round = 0; round < 3; ++round) {
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(other));
    const Stream stream;
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
    const CUdeviceptr p = allocate_async(MiB, stream);
    CHECK_CU(CUDA_SUCCESS, driver().MemsetD8Async(p, 5, MiB, stream));
    unsigned char last = 0;
    CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoHAsync(&last, p + MiB - 1, 1, stream));
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    finish(stream);
    EXPECT_EQ(last, 5);
  }
  CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(other));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
  const Stream stream;
  SharedWord bad;
  const CUdeviceptr p = allocate_async(MiB, stream);  // not memory of the context that is gone
  fill_hold_check(stream, p, MiB, 6, 0ms, bad);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
}

SCENARIO_WITHOUT_CONTEXT(two_devices) {
  use_primary_context();
  CUcontext first = nullptr, second = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&first));
  const CUdeviceptr p = allocate(MiB);
  CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&second, 1));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(second));
  const CUdeviceptr q = allocate(MiB);
  for (const auto& [pointer, device] : {std::pair{p, 0}, std::pair{q, 1}}) {
    int ordinal = -1;
    CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    EXPECT_EQ(ordinal, device);
  }
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));  // under the other device's context
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(first));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(q));
}

// Peer access enabled after and before an allocation reaches both.
SCENARIO(peer_access) {
  CUcontext first = nullptr, second = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&first));
  const CUdeviceptr early = allocate(MiB);
  CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&second, 1));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(second));
  CHECK_CU(CUDA_SUCCESS, driver().CtxEnablePeerAccess(first, 0));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(first));
  const CUdeviceptr late = allocate(100 * MiB);
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(second));
  CHECK_CU(CUDA_SUCCESS, harness::LoadKernels());
  SharedWord bad;
  const Stream stream;
  for (const CUdeviceptr p : {early, late}) fill_hold_check(stream, p, MiB, 6, 0ms, bad);
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(early));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(late));
}

int devices() {
  int count = 0;
  CHECK_CU(CUDA_SUCCESS, driver().DeviceGetCount(&count));
  return count;
}

TEST_F(Process, TwoDevices) {
  if (!Driver::Emulated() && devices() < 2) GTEST_SKIP() << "needs two devices";
  EXPECT_SCENARIO("two_devices", {"EMU_DEVICES=2"});
}

TEST_F(Process, PeerAccessReachesEveryBlock) {
  int possible = Driver::Emulated() ? 1 : 0;
  if (devices() >= 2) {
    CHECK_CU(CUDA_SUCCESS, driver().DeviceCanAccessPeer(&possible, 1, 0));
  }
  if (possible == 0) GTEST_SKIP() << "needs two devices with peer access";
  EXPECT_SCENARIO("peer_access", {"EMU_DEVICES=2"});
}

}  // namespace
