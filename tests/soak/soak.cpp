// The soak: a program of many threads allocates and frees by every call for as many operations as wanted, over the
// emulated driver under Cushion; at the end its memory is what it was after the warm-up, and the report's counters are
// the program's own.
//
//   soak [--operations 1M] [--threads 16]      CUSHION_ options in the environment are the run's
//
// One operation is one allocation or one free. Threads live for a twentieth of the run, then others take their place.
// Exit code 0 and one line of figures, or 1 and what was wrong.
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/harness/child.h"
#include "tests/harness/launch.h"

namespace {

using harness::driver;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kMaxSize = 96 * kMiB;  // of the pool: less than is asked for at times
// MiB that may come after a quarter of the run: pages of the device, of block records and of malloc's that chance has
// not touched by then. (A byte lost in every tenth allocation of a hundred million is as much.)
constexpr double kGrowth = 6;
constexpr int kRounds = 20;
constexpr int kWarmRounds = 5;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kMemoryIsFlat = false;  // the sanitizer's own memory grows with what it has seen
#else
constexpr bool kMemoryIsFlat = true;
#endif

// What the program has asked for, by the report's name of the function.
enum Function : std::size_t { kMalloc, kPitch, kAsync, kFromPool, kFunctions };
constexpr std::array<const char*, kFunctions> kNames{"cuMemAlloc", "cuMemAllocPitch", "cuMemAllocAsync",
                                                     "cuMemAllocFromPoolAsync"};
struct Counts {
  std::array<std::uint64_t, kFunctions> allocations{};
  std::uint64_t frees = 0;
  std::uint64_t operations() const {
    std::uint64_t sum = frees;
    for (const std::uint64_t count : allocations) sum += count;
    return sum;
  }
  void operator+=(const Counts& other) {
    for (std::size_t i = 0; i < kFunctions; ++i) allocations[i] += other.allocations[i];
    frees += other.frees;
  }
};

[[noreturn]] void fail(const char* what, CUresult result) {
  std::fprintf(stderr, "soak: %s answered %d\n", what, static_cast<int>(result));
  std::_Exit(3);
}
void must(const char* what, CUresult result) {
  if (result != CUDA_SUCCESS) fail(what, result);
}

// Blocks of cuMemAlloc on their way from one thread to another.
std::array<std::atomic<CUdeviceptr>, 64> mailbox{};

class Worker {
 public:
  Worker(CUcontext context, CUmemoryPool pool, CUdeviceptr bad, std::uint64_t seed)
      : pool_(pool), bad_(bad), random_(seed * 0x9E3779B97F4A7C15ull + 1) {
    must("cuCtxSetCurrent", driver().CtxSetCurrent(context));
    for (CUstream& stream : streams_) open(stream);
    must("cuEventCreate", driver().EventCreate(&event_, CU_EVENT_DISABLE_TIMING));
  }

  Counts run(std::uint64_t operations) {
    while (counts_.operations() < operations) step();
    for (const Block& block : blocks_) free(block);
    blocks_.clear();
    for (CUstream stream : streams_) must("cuStreamDestroy", driver().StreamDestroy(stream));
    must("cuEventDestroy", driver().EventDestroy(event_));
    return counts_;
  }

 private:
  struct Block {
    CUdeviceptr address;
    std::size_t stream;  // of streams_; kPerThread; kHost: no stream's
  };
  static constexpr std::size_t kStreams = 2, kPerThread = kStreams, kHost = kStreams + 1;
  static constexpr std::size_t kMostBlocks = 64;

  std::uint64_t next() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }
  // 512 B to 512 KiB, each power of two as likely as the others.
  std::size_t size() {
    const std::size_t least = std::size_t{512} << next() % 10;
    return least + next() % least;
  }
  void open(CUstream& stream) { must("cuStreamCreate", driver().StreamCreate(&stream, CU_STREAM_NON_BLOCKING)); }
  CUdeviceptr counted(Function function, const char* what, CUresult result, CUdeviceptr address) {
    must(what, result);
    ++counts_.allocations[function];
    return address;
  }

  void step() {
    const std::uint64_t dice = next() % 10'000;
    if (dice < 20) {
      seldom(dice);
    } else if (dice < 300) {
      exchange();
    } else if (blocks_.size() == kMostBlocks || (!blocks_.empty() && next() % 2 == 0)) {
      std::swap(blocks_[next() % blocks_.size()], blocks_.back());
      free(blocks_.back());
      blocks_.pop_back();
    } else {
      allocate(dice);
    }
  }

  void allocate(std::uint64_t dice) {
    const std::size_t bytes = size();
    CUdeviceptr address = 0;
    if (dice < 400) {
      std::size_t pitch = 0;
      const CUresult result = driver().MemAllocPitch(&address, &pitch, 1 + bytes / 8, 8, 4);
      blocks_.push_back({counted(kPitch, "cuMemAllocPitch", result, address), kHost});
    } else if (dice < 405) {
      const CUresult result = driver().MemAllocFromPoolAsync(&address, bytes, pool_, streams_[0]);
      blocks_.push_back({counted(kFromPool, "cuMemAllocFromPoolAsync", result, address), 0});
    } else if (dice < 800) {
      const CUresult result = driver().MemAlloc(&address, bytes);
      blocks_.push_back({counted(kMalloc, "cuMemAlloc", result, address), kHost});
    } else if (dice < 2000) {
      const CUresult result = driver().MemAllocAsync_ptsz(&address, bytes, nullptr);
      blocks_.push_back({counted(kAsync, "cuMemAllocAsync", result, address), kPerThread});
    } else {
      const std::size_t stream = dice % kStreams;
      const CUresult result = driver().MemAllocAsync(&address, bytes, streams_[stream]);
      blocks_.push_back({counted(kAsync, "cuMemAllocAsync", result, address), stream});
    }
  }

  // Nothing is in flight on a block of cuMemAlloc: it may be freed on any stream. Most are, as frees that wait for all
  // the others' work would be all that happens.
  void free(const Block& block) {
    CUresult result = CUDA_SUCCESS;
    if (block.stream == kPerThread) {
      result = driver().MemFreeAsync_ptsz(block.address, nullptr);
    } else if (block.stream != kHost) {
      result = driver().MemFreeAsync(block.address, streams_[block.stream]);
    } else if (next() % 4 == 0) {
      result = driver().MemFree(block.address);
    } else {
      result = driver().MemFreeAsync(block.address, streams_[0]);
    }
    must("a free", result);
    ++counts_.frees;
  }

  void exchange() {
    CUdeviceptr address = 0;
    const CUresult result = driver().MemAlloc(&address, size());
    const CUdeviceptr mine = counted(kMalloc, "cuMemAlloc", result, address);
    const CUdeviceptr other = mailbox[next() % mailbox.size()].exchange(mine);
    if (other != 0) free({other, kHost});
  }

  void seldom(std::uint64_t dice) {
    const std::size_t one = dice % kStreams;
    if (dice < 6) {  // an order between its streams, which the pool may use
      must("cuEventRecord", driver().EventRecord(event_, streams_[one]));
      must("cuStreamWaitEvent", driver().StreamWaitEvent(streams_[1 - one], event_, 0));
    } else if (dice < 12) {  // a block in use while it is freed
      CUdeviceptr address = 0;
      const CUresult result = driver().MemAllocAsync(&address, 4096, streams_[one]);
      counted(kAsync, "cuMemAllocAsync", result, address);
      const auto value = static_cast<std::uint32_t>(next() % 256);
      must("cuLaunchKernel", harness::LaunchFillHoldCheck(streams_[one], address, 4096, value, 0, bad_));
      free({address, one});
    } else if (dice < 15) {
      std::size_t idle = 0, total = 0;
      must("cuMemGetInfo", driver().MemGetInfo(&idle, &total));
    } else if (dice < 17) {
      must("cuStreamSynchronize", driver().StreamSynchronize(streams_[one]));
    } else if (dice < 18) {
      must("cuCtxSynchronize", driver().CtxSynchronize());
    } else {  // another stream in its place: what is alive of the old one is freed on the new one
      must("cuStreamSynchronize", driver().StreamSynchronize(streams_[one]));
      must("cuStreamDestroy", driver().StreamDestroy(streams_[one]));
      open(streams_[one]);
    }
  }

  const CUmemoryPool pool_;
  const CUdeviceptr bad_;
  std::uint64_t random_;
  std::array<CUstream, kStreams> streams_{};
  CUevent event_ = nullptr;
  std::vector<Block> blocks_;
  Counts counts_;
};

double resident_mib() {
  std::ifstream statm("/proc/self/statm");
  std::size_t pages = 0;
  statm >> pages >> pages;
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE)) / static_cast<double>(kMiB);
}

// The program itself: prints what it did, as JSON.
int work(std::uint64_t operations, unsigned threads) {
  CUcontext context = nullptr;
  CUmemoryPool pool = nullptr;
  must("cuInit", driver().Init(0));
  must("cuDevicePrimaryCtxRetain", driver().DevicePrimaryCtxRetain(&context, 0));
  must("cuCtxSetCurrent", driver().CtxSetCurrent(context));
  must("cuDeviceGetDefaultMemPool", driver().DeviceGetDefaultMemPool(&pool, 0));
  must("the kernels", harness::LoadKernels());
  void* word = nullptr;
  CUdeviceptr bad = 0;
  must("cuMemHostAlloc", driver().MemHostAlloc(&word, sizeof(std::uint32_t), CU_MEMHOSTALLOC_DEVICEMAP));
  must("cuMemHostGetDevicePointer", driver().MemHostGetDevicePointer(&bad, word, 0));

  // The device is host memory: all that the pool will hold is touched first, so that kernels add nothing later.
  Counts counts;
  CUdeviceptr all = 0;
  must("cuMemAlloc", driver().MemAlloc(&all, kMaxSize - 2 * kMiB));
  must("cuMemsetD8", driver().MemsetD8(all, 0, kMaxSize - 2 * kMiB));
  must("cuMemFree", driver().MemFree(all));
  ++counts.allocations[kMalloc];
  ++counts.frees;
  std::vector<double> resident;
  const auto start = std::chrono::steady_clock::now();
  for (unsigned round = 0; round < kRounds; ++round) {
    std::vector<Counts> done(threads);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads; ++i) {
      running.emplace_back(
          [&, i] { done[i] = Worker(context, pool, bad, round * threads + i).run(operations / kRounds / threads); });
    }
    for (std::thread& thread : running) thread.join();
    for (const Counts& own : done) counts += own;
    resident.push_back(resident_mib());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  for (std::atomic<CUdeviceptr>& slot : mailbox) {
    if (const CUdeviceptr address = slot.exchange(0); address != 0) {
      must("cuMemFree", driver().MemFree(address));
      ++counts.frees;
    }
  }
  must("cuCtxSynchronize", driver().CtxSynchronize());
  nlohmann::json said{{"seconds", seconds.count()},
                      {"frees", counts.frees},
                      {"operations", counts.operations()},
                      {"resident", resident},
                      {"changed_bytes", *static_cast<std::uint32_t*>(word)}};
  for (std::size_t i = 0; i < kFunctions; ++i) said["allocations"][kNames[i]] = counts.allocations[i];
  std::cout << said << std::endl;
  return 0;
}

// What the report and the program do not agree about.
std::vector<std::string> differences(const nlohmann::json& said, const nlohmann::json& report) {
  std::vector<std::string> found;
  const auto equal = [&](const std::string& what, std::uint64_t in_report, std::uint64_t expected) {
    if (in_report == expected) return;
    found.push_back(what + " " + std::to_string(in_report) + ", expected " + std::to_string(expected));
  };
  const nlohmann::json& calls = report["calls"];
  std::uint64_t allocations = 0;
  for (const auto& [name, count] : said["allocations"].items()) {
    const nlohmann::json& by = calls["by_function"][name];
    equal(name, by["served"].get<std::uint64_t>() + by["forwarded"].get<std::uint64_t>(), count);
    allocations += count.get<std::uint64_t>();
  }
  equal("frees", calls["frees_served"].get<std::uint64_t>() + calls["frees_forwarded"].get<std::uint64_t>(),
        allocations);
  equal("the program's frees", said["frees"], allocations);
  equal("blocks lost in a reset", calls["reset_blocks"], 0);
  equal("live groups", report["live"].size(), 0);
  for (const nlohmann::json& device : report["devices"]) {
    for (const char* figure : {"requested", "handed_out", "forwarded"}) equal(figure, device[figure]["current"], 0);
    if (device["held"]["peak"] > kMaxSize) found.push_back("held " + device["held"].dump() + ", above MAX_SIZE");
  }
  if (!report["live_complete"]) found.emplace_back("the list of live blocks is not complete");
  equal("bytes that changed in use", said["changed_bytes"], 0);
  const double warm = said["resident"][kWarmRounds - 1], end = said["resident"].back();
  if (kMemoryIsFlat && end > warm + kGrowth) {
    found.push_back("resident memory grew from " + std::to_string(warm) + " to " + std::to_string(end) + " MiB");
  }
  return found;
}

int watch(const std::vector<std::string>& command) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path build = program.parent_path().parent_path().parent_path();
  const std::filesystem::path report = std::filesystem::temp_directory_path() / ("soak." + std::to_string(getpid()));
  const harness::ChildResult child = harness::RunProgram(
      command, {{"SOAK_REPORT", report},
                {"CUSHION_REPORT", report},
                {"CUSHION_MAX_SIZE", std::to_string(kMaxSize)},
                {"CUSHION_INITIAL_SIZE", std::to_string(kMaxSize)},
                {"LD_PRELOAD", build / "libcushion.so"},
                {"LD_LIBRARY_PATH", build / "emulator"},
                {"EMU_MEMORY", "1G"},
                {"MALLOC_ARENA_MAX", "1"}});  // else each thread's own arena keeps what it freed, more and more
  const nlohmann::json said = nlohmann::json::parse(child.output, nullptr, false);
  std::ifstream file(report);
  const nlohmann::json known = nlohmann::json::parse(file, nullptr, false);
  std::filesystem::remove(report);
  if (child.status != 0 || said.is_discarded() || known.is_discarded()) {
    std::cout << "soak: the program ended with " << child.status << ", report "
              << (known.is_discarded() ? "missing" : "there") << "\n"
              << child.output;
    return 1;
  }
  const std::vector<std::string> wrong = differences(said, known);
  const nlohmann::json& held = known["devices"][0]["held"];
  std::printf(
      "soak: %s, %s: %llu operations in %.1f s (%.2f million a second), %llu of them allocations, served %llu;\n"
      "  resident %.1f MiB after a quarter, %.1f MiB at the end; held at most %.1f MiB; %s\n",
      known["options"]["ALLOCATOR"].get<std::string>().c_str(), known["options"]["FREE"].get<std::string>().c_str(),
      static_cast<unsigned long long>(said["operations"]), said["seconds"].get<double>(),
      said["operations"].get<double>() / said["seconds"].get<double>() * 1e-6,
      static_cast<unsigned long long>(said["frees"]), static_cast<unsigned long long>(known["calls"]["served"]),
      said["resident"][kWarmRounds - 1].get<double>(), said["resident"].back().get<double>(),
      held["peak"].get<double>() / static_cast<double>(kMiB),
      wrong.empty() ? "every counter is the program's" : "WRONG:");
  for (const std::string& line : wrong) std::printf("  %s\n", line.c_str());
  return wrong.empty() ? 0 : 1;
}

std::uint64_t number(std::string_view text) {
  const std::uint64_t value = std::strtoull(text.data(), nullptr, 10);
  return text.ends_with('M') ? value * 1'000'000 : text.ends_with('k') ? value * 1'000 : value;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t operations = 1'000'000;
  unsigned threads = 16;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--operations" && !value.empty()) {
      operations = number(value);
    } else if (name == "--threads" && !value.empty()) {
      threads = static_cast<unsigned>(number(value));
    } else {
      std::fprintf(stderr, "usage: soak [--operations 1M] [--threads 16]\n");
      return 2;
    }
  }
  if (std::getenv("SOAK_REPORT") != nullptr) return work(operations, threads);
  std::vector<std::string> command(argv, argv + argc);
  command[0] = "/proc/self/exe";
  return watch(command);
}
