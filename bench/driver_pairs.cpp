// driver_pairs: the loops of pair, random_allocations, threads and fragmentation over the driver API.
//
// It links no CUDA library and finds the driver as the runtime does: dlopen, dlsym of cuGetProcAddress, then
// everything through that. It therefore also runs over the emulated driver, where a call to the driver costs
// next to nothing like a real one: there only the time of a preload that does *not* call the driver means something.
//
//   BM_MallocFreePair, BM_MallocFreeAsyncPair, BM_RandomAllocations, BM_RandomAllocationsAsync,
//   BM_ThreadsMalloc, BM_ThreadsAsync, BM_Fragmentation, BM_FragmentationAsync

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "workloads.h"

namespace {

[[noreturn]] void fail(const char* what, int code) {
  std::fprintf(stderr, "%s failed (%d)\n", what, code);
  std::exit(1);
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) fail(what, result);
}

struct Driver {
  decltype(&cuInit) init;
  decltype(&cuDeviceGetCount) device_get_count;
  decltype(&cuDevicePrimaryCtxRetain) primary_retain;
  decltype(&cuCtxSetCurrent) ctx_set_current;
  decltype(&cuStreamCreate) stream_create;
  decltype(&cuStreamDestroy) stream_destroy;
  decltype(&cuMemAlloc) mem_alloc;
  decltype(&cuMemFree) mem_free;
  decltype(&cuMemAllocAsync) mem_alloc_async;
  decltype(&cuMemFreeAsync) mem_free_async;

  CUcontext context = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) skip(dlerror());
    find_ = reinterpret_cast<Find>(dlsym(library, "cuGetProcAddress_v2"));
    if (find_ == nullptr) skip("libcuda.so.1 is older than CUDA 12");
    find(init, "cuInit", 2000);
    find(device_get_count, "cuDeviceGetCount", 2000);
    find(primary_retain, "cuDevicePrimaryCtxRetain", 7000);
    find(ctx_set_current, "cuCtxSetCurrent", 4000);
    find(stream_create, "cuStreamCreate", 2000);
    find(stream_destroy, "cuStreamDestroy", 4000);
    find(mem_alloc, "cuMemAlloc", 3020);
    find(mem_free, "cuMemFree", 3020);
    find(mem_alloc_async, "cuMemAllocAsync", 11020);
    find(mem_free_async, "cuMemFreeAsync", 11020);
    int devices = 0;
    if (init(0) != CUDA_SUCCESS || device_get_count(&devices) != CUDA_SUCCESS || devices == 0) skip("no CUDA device");
    check(primary_retain(&context, 0), "cuDevicePrimaryCtxRetain");
  }

  // Every benchmark's thread works in the primary context.
  void enter() const { check(ctx_set_current(context), "cuCtxSetCurrent"); }

 private:
  using Find = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  Find find_ = nullptr;

  template <typename Function>
  void find(Function& function, const char* name, int version) const {
    void* address = nullptr;
    check(find_(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr), name);
    if (address == nullptr) fail(name, CUDA_ERROR_NOT_FOUND);
    function = reinterpret_cast<Function>(address);
  }

  [[noreturn]] static void skip(const char* reason) {
    std::fprintf(stderr, "SKIP: %s\n", reason);
    std::exit(77);
  }
};

void* to_pointer(CUdeviceptr block) { return reinterpret_cast<void*>(block); }
CUdeviceptr to_device(void* block) { return reinterpret_cast<CUdeviceptr>(block); }

// cuMemAlloc and cuMemFree.
struct MallocApi {
  const Driver* driver;

  explicit MallocApi(const Driver& d) : driver{&d} { d.enter(); }

  bool allocate(void*& block, std::size_t bytes) const {
    CUdeviceptr address = 0;
    const CUresult result = driver->mem_alloc(&address, bytes);
    block = to_pointer(address);
    return result == CUDA_SUCCESS;
  }
  bool free(void* block, std::size_t) const { return driver->mem_free(to_device(block)) == CUDA_SUCCESS; }
};

// cuMemAllocAsync and cuMemFreeAsync on a stream of its own.
struct AsyncApi {
  const Driver* driver;
  CUstream stream = nullptr;

  explicit AsyncApi(const Driver& d) : driver{&d} {
    d.enter();
    check(d.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~AsyncApi() { check(driver->stream_destroy(stream), "cuStreamDestroy"); }
  AsyncApi(const AsyncApi&) = delete;
  AsyncApi& operator=(const AsyncApi&) = delete;

  bool allocate(void*& block, std::size_t bytes) const {
    CUdeviceptr address = 0;
    const CUresult result = driver->mem_alloc_async(&address, bytes, stream);
    block = to_pointer(address);
    return result == CUDA_SUCCESS;
  }
  bool free(void* block, std::size_t) const { return driver->mem_free_async(to_device(block), stream) == CUDA_SUCCESS; }
};

template <bench::Api A>
void add_benchmarks(const Driver& driver, const std::string& allocator, const std::string& api) {
  const auto add = [](const std::string& name, auto workload) {
    return benchmark::RegisterBenchmark(name.c_str(), workload)->UseRealTime();
  };
  for (const std::size_t bytes : {bench::KiB, bench::MiB}) {
    add("BM_MallocFree" + api + "Pair/" + allocator + "/" + std::to_string(bytes),
        [&driver, bytes](benchmark::State& state) { bench::pair(state, A{driver}, bytes); });
  }
  for (const std::size_t count : {std::size_t{1000}, std::size_t{10000}}) {
    add("BM_RandomAllocations" + api + "/" + allocator + "/" + std::to_string(count) + "/1",
        [&driver, count](benchmark::State& state) {
          bench::random_allocations(state, A{driver}, bench::uniform_trace(count, bench::MiB, 512 * bench::MiB));
        })
        ->Unit(benchmark::kMillisecond);
  }
  constexpr std::size_t bytes = 64 * bench::KiB;
  add("BM_Threads" + (api.empty() ? "Malloc" : api) + "/" + allocator + "/" + std::to_string(bytes),
      [&driver](benchmark::State& state) { bench::pair(state, A{driver}, bytes); })
      ->ThreadRange(1, 16);
  for (const bench::Mix& mix : bench::mixes) {
    add("BM_Fragmentation" + api + "/" + allocator + "/" + mix.name, [&driver, &mix](benchmark::State& state) {
      bench::fragmentation(state, A{driver}, mix.trace(), [] { return std::optional<std::size_t>{}; });
    })->Iterations(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string allocator = bench::take_flag(argc, argv, "allocator", "native");
  const Driver driver;
  add_benchmarks<MallocApi>(driver, allocator, "");
  add_benchmarks<AsyncApi>(driver, allocator, "Async");
  return bench::run(argc, argv);
}
