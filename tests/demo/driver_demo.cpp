// A driver-API program as plugins and language bindings are: it loads libcuda.so.1 when it runs, and works by
// fills and copies alone, so that it also runs over the emulated driver, which executes no kernels.
//
// Every iteration allocates temporaries, passes a picture through them and frees them. The checksum goes to
// stdout, the time, which differs from run to run, to stderr.
//
//   driver_demo [ITERATIONS]
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace {

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "driver_demo: %s answered %d\n", call, static_cast<int>(result));
  std::exit(1);
}

void* load(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const function = driver != nullptr ? dlsym(driver, name) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "driver_demo: %s: %s\n", name, dlerror());
    std::exit(1);
  }
  return function;
}

// cuda.h names the current version of a function by a macro: SYMBOL(cuMemAlloc) is "cuMemAlloc_v2".
#define STRING_OF(name) #name
#define SYMBOL(name) STRING_OF(name)
#define CALL(name, ...)                                                                 \
  do {                                                                                  \
    static const auto function = reinterpret_cast<decltype(&name)>(load(SYMBOL(name))); \
    check(function(__VA_ARGS__), SYMBOL(name));                                         \
  } while (false)

constexpr std::size_t kWords = 1 << 18;  // a picture of 1 MiB
constexpr std::size_t kBytes = kWords * sizeof(std::uint32_t);
constexpr unsigned kStages = 6;

// One picture through all stages, each with a temporary of its own size, all freed at the end.
std::uint64_t process(unsigned round, CUstream stream, std::vector<std::uint32_t>& host) {
  std::array<CUdeviceptr, kStages> stages{};
  for (unsigned stage = 0; stage < kStages; ++stage) {
    CALL(cuMemAlloc, &stages[stage], kBytes + stage * 4096);
    const std::size_t band = kWords / kStages;
    if (stage == 0) {
      CALL(cuMemsetD32Async, stages[0], round, kWords, stream);
    } else {
      CALL(cuMemcpyDtoDAsync, stages[stage], stages[stage - 1], kBytes, stream);
    }
    CALL(cuMemsetD32Async, stages[stage] + stage * band * sizeof(std::uint32_t), round * kStages + stage, band, stream);
  }
  CALL(cuMemcpyDtoHAsync, host.data(), stages.back(), kBytes, stream);
  CALL(cuStreamSynchronize, stream);
  for (const CUdeviceptr stage : stages) CALL(cuMemFree, stage);
  return std::accumulate(host.begin(), host.end(), std::uint64_t{0});
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned iterations = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : 300;
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CALL(cuInit, 0);
  CALL(cuDeviceGet, &device, 0);
  CALL(cuDevicePrimaryCtxRetain, &context, device);
  CALL(cuCtxSetCurrent, context);
  CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);

  std::vector<std::uint32_t> host(kWords);
  std::uint64_t checksum = 0;
  const auto start = std::chrono::steady_clock::now();
  for (unsigned round = 1; round <= iterations; ++round) checksum = checksum * 31 + process(round, stream, host);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;

  CALL(cuStreamDestroy, stream);
  std::printf("%u iterations of %u temporaries, checksum %016llx\n", iterations, kStages,
              static_cast<unsigned long long>(checksum));
  std::fprintf(stderr, "%.1f ms\n", time.count());
  return 0;
}
