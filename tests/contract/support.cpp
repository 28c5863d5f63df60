#include <fcntl.h>
#include <gtest/gtest.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string_view>
#include <thread>

#include "tests/contract/contract.h"

extern char** environ;

namespace contract {
namespace {

// Whether an object whose file name begins so is mapped into this process.
bool mapped(const char* file) {
  return dl_iterate_phdr(
             [](dl_phdr_info* object, std::size_t, void* wanted) {
               const std::string_view path = object->dlpi_name;
               const std::string_view name = path.substr(path.rfind('/') + 1);
               return name.starts_with(static_cast<const char*>(wanted)) ? 1 : 0;
             },
             const_cast<char*>(file)) != 0;
}

}  // namespace

bool under_cushion() {
  static const bool mapped_here = mapped("libcushion.so");
  return mapped_here;
}

bool deferred() {
  const char* mode = std::getenv("CUSHION_FREE");
  return under_cushion() && mode != nullptr && std::strcmp(mode, "deferred") == 0;
}

static std::string_view allocator() {
  const char* name = std::getenv("CUSHION_ALLOCATOR");
  return name != nullptr ? name : "pool";
}

bool pooled() { return under_cushion() && allocator() != "async" && allocator() != "cuda"; }

bool packs() { return pooled() && allocator() != "binning"; }

CUdeviceptr allocate(std::size_t size) {
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemAlloc(&p, size));
  return p;
}

CUdeviceptr allocate_async(std::size_t size, CUstream stream) {
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocAsync(&p, size, stream));
  return p;
}

void write_ends(CUdeviceptr p, std::size_t size) {
  const std::size_t end = std::min(size, 64 * KiB);
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p, 9, end));
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p + size - end, 9, end));
}

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemGetInfo(&free, &total));
  return free;
}

bool busy(CUstream stream) {
  const CUresult result = driver().StreamQuery(stream);
  EXPECT_TRUE(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) << result;
  return result == CUDA_ERROR_NOT_READY;
}

void finish(CUstream stream) { CHECK_CU(CUDA_SUCCESS, driver().StreamSynchronize(stream)); }

void order(CUstream before, CUstream after) {
  const Event event;
  CHECK_CU(CUDA_SUCCESS, driver().EventRecord(event, before));
  CHECK_CU(CUDA_SUCCESS, driver().StreamWaitEvent(after, event, 0));
}

namespace {
std::uint64_t ns(std::chrono::milliseconds time) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
}
}  // namespace

void hold(CUstream stream, std::chrono::milliseconds time) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchHold(stream, ns(time)));
}
void fill(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte, std::chrono::milliseconds time) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchFill(stream, p, size, byte, ns(time)));
}
void copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t size, std::chrono::milliseconds time) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchCopy(stream, to, from, size, ns(time)));
}
void check(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte, const SharedWord& bad) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchCheck(stream, p, size, byte, bad.on_device()));
}
void fill_hold_check(CUstream stream, CUdeviceptr p, std::size_t size, std::uint8_t byte,
                     std::chrono::milliseconds time, const SharedWord& bad) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchFillHoldCheck(stream, p, size, byte, ns(time), bad.on_device()));
}
void wait_flag(CUstream stream, const SharedWord& flag) {
  CHECK_CU(CUDA_SUCCESS, harness::LaunchWaitFlag(stream, flag.on_device(), ns(30s)));
}

void use_primary_context() {
  static const CUcontext primary = [] {
    CUcontext context = nullptr;
    CHECK_CU(CUDA_SUCCESS, driver().Init(0));
    CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&context, 0));
    return context;
  }();
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
  CHECK_CU(CUDA_SUCCESS, harness::LoadKernels());
}

namespace {

// A sticky error leaves no call of this process that works: the test that got it ends there, and the others are not
// run, else each would fail, or crash, for it.
std::string broken_by;  // that test
const std::thread::id main_thread = std::this_thread::get_id();

bool context_is_broken() {
  std::size_t free = 0, total = 0;
  const CUresult result = driver().MemGetInfo(&free, &total);
  return result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_CONTEXT;
}

class EndTestInBrokenContext : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    running_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed() || running_.empty() || std::this_thread::get_id() != main_thread) return;
    if (!broken_by.empty() || !Driver::Missing().empty() || !context_is_broken()) return;
    broken_by = running_;
    throw testing::AssertionException(result);
  }

  std::string running_;  // empty in a scenario
};

}  // namespace

void Contract::SetUp() {
  if (!Driver::Missing().empty()) GTEST_SKIP() << Driver::Missing();
  if (!broken_by.empty()) GTEST_SKIP() << broken_by << " broke the context";
  use_primary_context();
}

void Contract::TearDown() {
  if (IsSkipped() || !broken_by.empty()) return;
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
}

// --- Processes ---------------------------------------------------------------------------------------------

namespace {

struct Entry {
  bool with_context;
  void (*body)();
};
std::map<std::string, Entry, std::less<>>& scenarios() {
  static std::map<std::string, Entry, std::less<>> all;
  return all;
}

// An unnamed file that a child writes to and this process reads afterwards: unlike a pipe it never fills, and
// a grandchild that outlives the child holds nobody up.
class Capture {
 public:
  Capture() : file_(std::tmpfile(), &std::fclose) {}
  int descriptor() const { return fileno(file_.get()); }
  std::string text() const {
    std::string text;
    std::rewind(file_.get());
    for (int c = 0; (c = std::fgetc(file_.get())) != EOF;) text.push_back(static_cast<char>(c));
    return text;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace

Scenario::Scenario(const char* name, bool with_context, void (*body)()) {
  scenarios().emplace(name, Entry{with_context, body});
}

bool expectations_failed() { return testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed(); }

int scenario_main(const std::string& name) {
  const auto found = scenarios().find(name);
  if (found == scenarios().end()) {
    std::fprintf(stderr, "no scenario is named %s\n", name.c_str());
    return 2;
  }
  if (found->second.with_context) use_primary_context();
  found->second.body();
  return expectations_failed() ? 1 : 0;
}

bool Outcome::exited(int code) const { return !timed_out && WIFEXITED(status) && WEXITSTATUS(status) == code; }
bool Outcome::killed(int signal) const { return !timed_out && WIFSIGNALED(status) && WTERMSIG(status) == signal; }

std::ostream& operator<<(std::ostream& stream, const Outcome& outcome) {
  if (outcome.timed_out) {
    stream << "still running after its time";
  } else if (WIFEXITED(outcome.status)) {
    stream << "exit code " << WEXITSTATUS(outcome.status);
  } else {
    stream << "killed by signal " << WTERMSIG(outcome.status);
  }
  return stream << "\n--- stdout\n" << outcome.out << "\n--- stderr\n" << outcome.err;
}

Outcome run_scenario(const std::string& name, const std::vector<std::string>& environment,
                     std::chrono::seconds timeout) {
  // This process's environment; a name given again replaces it. Sanitizers must leave deadly signals alone.
  std::vector<std::string> variables;
  const auto set = [&variables](const std::string& variable) {
    const std::size_t equals = variable.find('=');
    const std::string prefix = variable.substr(0, equals == std::string::npos ? equals : equals + 1);
    std::erase_if(variables, [&](const std::string& other) { return other.starts_with(prefix); });
    if (equals != std::string::npos) variables.push_back(variable);
  };
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  for (const char* sanitizer : {"ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"}) {
    const char* options = std::getenv(sanitizer);
    set(std::string(sanitizer) + "=handle_segv=0:handle_abort=0:handle_sigbus=0" +
        (options != nullptr ? std::string(":") + options : ""));
  }
  for (const std::string& variable : environment) set(variable);
  std::vector<char*> pointers;
  pointers.reserve(variables.size() + 1);
  for (std::string& variable : variables) pointers.push_back(variable.data());
  pointers.push_back(nullptr);

  const Capture out, err;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out.descriptor(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.descriptor(), STDERR_FILENO);
  // Whoever runs the tests may ignore signals (nohup, a shell's background job): a scenario starts with the defaults.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t all;
  sigfillset(&all);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::string argument_zero = program, argument = "--scenario=" + name;
  char* const arguments[] = {argument_zero.data(), argument.data(), nullptr};
  Outcome outcome;
  const int failed = posix_spawn(&outcome.pid, program.c_str(), &actions, &attributes, arguments, pointers.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(failed, 0) << std::strerror(failed);
  if (failed != 0) return outcome;

  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (waitpid(outcome.pid, &outcome.status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      outcome.timed_out = true;
      kill(-outcome.pid, SIGKILL);  // and the processes that it made
      waitpid(outcome.pid, &outcome.status, 0);
      break;
    }
    std::this_thread::sleep_for(1ms);
  }
  outcome.out = out.text();
  outcome.err = err.text();
  return outcome;
}

Scratch::Scratch() {
  std::string pattern = (std::filesystem::temp_directory_path() / "contract.XXXXXX").string();
  EXPECT_NE(mkdtemp(pattern.data()), nullptr);
  directory_ = pattern;
}
Scratch::~Scratch() {
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

std::vector<std::string> Scratch::files() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

nlohmann::json Scratch::report(const std::string& name) const {
  std::ifstream file(path(name));
  nlohmann::json report = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(report.is_discarded()) << path(name) << " is missing or not JSON";
  return report.is_discarded() ? nlohmann::json() : report;
}

}  // namespace contract

int main(int argc, char** argv) {
  // A kernel loaded at its first launch may wait for those that run: natively, too, but it is no rule here.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new contract::EndTestInBrokenContext);
  if (argc == 2 && std::string_view(argv[1]).starts_with("--scenario=")) {
    return contract::scenario_main(argv[1] + std::strlen("--scenario="));
  }
  return RUN_ALL_TESTS();
}
