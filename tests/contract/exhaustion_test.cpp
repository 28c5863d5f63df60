// Contract §6, running out: a cache must never make anybody's allocation fail that would succeed without it.
#include <atomic>
#include <functional>
#include <latch>
#include <numeric>
#include <thread>

#include "tests/contract/contract.h"

namespace {

using namespace contract;

class Exhaustion : public Contract {};

std::size_t device_memory() {
  std::size_t free = 0, total = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemGetInfo(&free, &total));
  return total;
}

// Size of a block of which about `count` make up the device.
std::size_t share(std::size_t count) { return device_memory() / count / (2 * MiB) * (2 * MiB); }

// Allocates until the device is full.
std::vector<CUdeviceptr> fill_device(std::size_t size) {
  std::vector<CUdeviceptr> blocks;
  CUdeviceptr p = 0;
  CUresult result = CUDA_SUCCESS;
  while ((result = driver().MemAlloc(&p, size)) == CUDA_SUCCESS) blocks.push_back(p);
  EXPECT_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
  return blocks;
}

void free_all(const std::vector<CUdeviceptr>& blocks) {
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

// Natively all but a remainder. Under Cushion a segment that serves several blocks may end in a piece too short for
// another one: little where blocks are small beside a segment, and nothing where each is a segment of its own.
TEST_F(Exhaustion, TheWholeDeviceCanBeAllocated) {
  for (const std::size_t count : {std::size_t{3}, std::size_t{48}, std::size_t{1000}}) {
    const std::size_t size = share(count), free = free_memory();
    const std::vector<CUdeviceptr> blocks = fill_device(size);
    EXPECT_GE((blocks.size() + 2) * size, under_cushion() ? free / 100 * 85 : free) << size;
    free_all(blocks);
  }
}

TEST_F(Exhaustion, AfterOutOfMemoryABigBlockFits) {
  for (const std::size_t count : {std::size_t{48}, std::size_t{7}, std::size_t{300}}) {
    free_all(fill_device(share(count)));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(device_memory() / 4 * 3)));
  }
}

TEST_F(Exhaustion, EveryThreadsCacheIsEmptied) {
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  const std::size_t size = share(400);
  std::latch cached{1}, done{1};
  std::thread other([&] {
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
    std::vector<CUdeviceptr> blocks(200);
    for (CUdeviceptr& p : blocks) p = allocate(size);
    free_all(blocks);
    cached.count_down();
    done.wait();  // alive, and idle, with whatever it cached
  });
  cached.wait();
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(device_memory() / 4 * 3)));
  done.count_down();
  other.join();
}

TEST_F(Exhaustion, AnIdleStreamsMemoryServesOthers) {
  const Stream stream, other;
  std::vector<CUdeviceptr> blocks(24);
  for (CUdeviceptr& p : blocks) p = allocate_async(share(48), stream);
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  finish(stream);
  const CUdeviceptr sync = allocate(device_memory() / 4 * 3);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(sync));
  const CUdeviceptr async = allocate_async(device_memory() / 4 * 3, other);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(async, other));
  finish(other);
}

// The device is full and its last free block was freed on a busy stream: another stream may get it, ordered
// after that stream's work (the driver may also say that there is none).
TEST_F(Exhaustion, ABusyStreamsMemoryServesOthersInOrder) {
  const std::size_t size = share(48);
  SharedWord bad;
  const Stream stream, other;
  const CUdeviceptr p = allocate_async(size, stream);
  finish(stream);
  const std::vector<CUdeviceptr> blocks = fill_device(size);
  fill_hold_check(stream, p, 4 * MiB, 0x77, 20ms, bad);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  CUdeviceptr q = 0;
  const CUresult result = driver().MemAllocAsync(&q, size, other);
  if (result == CUDA_SUCCESS) {
    fill(other, q, 4 * MiB, 0x88);
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(q, other));
  } else {
    EXPECT_FALSE(under_cushion());
    EXPECT_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
  }
  finish(other);
  finish(stream);
  EXPECT_EQ(bad.Get(), 0U);
  free_all(blocks);
}

// A kernel that never ends by itself makes out of memory no hang: it is answered while the kernel runs.
TEST_F(Exhaustion, ASpinningKernelDoesNotHangOutOfMemory) {
  SharedWord flag;
  const Stream stream;
  const std::size_t size = share(48);
  std::vector<CUdeviceptr> cached(12);
  for (CUdeviceptr& p : cached) p = allocate(size);
  free_all(cached);
  wait_flag(stream, flag);
  if (under_cushion()) {  // whether the driver waits for what its own pool will get back is its own matter
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(allocate_async(size, stream), stream));
  }
  const std::vector<CUdeviceptr> blocks = fill_device(size + 2 * MiB);
  EXPECT_TRUE(busy(stream));
  flag.Set(1);
  finish(stream);
  free_all(blocks);
}

// Everything is cached by whoever caches; then others want most of the device.
void others_want_most(const std::function<void(std::size_t size)>& allocate_and_free) {
  free_all(fill_device(share(48)));
  allocate_and_free(device_memory() / 4 * 3 / (2 * MiB) * (2 * MiB));
  free_all(fill_device(share(48)));
}

TEST_F(Exhaustion, ManagedMemoryIsNotStarved) {
  others_want_most([](std::size_t size) {
    CUdeviceptr p = 0;
    CHECK_CU(CUDA_SUCCESS, driver().MemAllocManaged(&p, size, CU_MEM_ATTACH_GLOBAL));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  });
}

CUmemLocation device_zero() {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = 0;
  return location;
}

TEST_F(Exhaustion, APoolOfTheProgramIsNotStarved) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = device_zero();
  CUmemoryPool pool = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().MemPoolCreate(&pool, &properties));
  others_want_most([&](std::size_t size) {
    const Stream stream;
    CUdeviceptr p = 0;
    CHECK_CU(CUDA_SUCCESS, driver().MemAllocFromPoolAsync(&p, size, pool, stream));
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
    finish(stream);
  });
  CHECK_CU(CUDA_SUCCESS, driver().MemPoolDestroy(pool));
}

TEST_F(Exhaustion, VirtualMemoryIsNotStarved) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = device_zero();
  others_want_most([&](std::size_t size) {
    CUmemGenericAllocationHandle handle = 0;
    CHECK_CU(CUDA_SUCCESS, driver().MemCreate(&handle, size, &properties, 0));
    CHECK_CU(CUDA_SUCCESS, driver().MemRelease(handle));
  });
}

// Any forwarded call that runs out of memory is made again, once, after the cache was given back. Natively its
// answer is the program's.
void forwarded_call_runs_out(const std::function<CUresult()>& call) {
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(64 * MiB)));
  EXPECT_EQ(call(), under_cushion() ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(call(), CUDA_SUCCESS);
}

SCENARIO(managed_runs_out) {
  forwarded_call_runs_out([] {
    CUdeviceptr p = 0;
    return driver().MemAllocManaged(&p, MiB, CU_MEM_ATTACH_GLOBAL);
  });
}

SCENARIO(stream_runs_out) {
  forwarded_call_runs_out([] {
    CUstream stream = nullptr;
    return driver().StreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  });
}

SCENARIO(virtual_memory_runs_out) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = device_zero();
  forwarded_call_runs_out([&] {
    CUmemGenericAllocationHandle handle = 0;
    return driver().MemCreate(&handle, 2 * MiB, &properties, 0);
  });
}

TEST_F(Exhaustion, ForwardedCallsAreMadeAgain) {
  if (!Driver::Emulated()) GTEST_SKIP() << "only the emulated driver fails on demand";
  EXPECT_SCENARIO("managed_runs_out", {"EMU_FAIL=cuMemAllocManaged:1"});
  EXPECT_SCENARIO("stream_runs_out", {"EMU_FAIL=cuStreamCreate:1"});
  EXPECT_SCENARIO("virtual_memory_runs_out", {"EMU_FAIL=cuMemCreate:1"});
}

// What one context has cached is another's of the same device, when it asks for it.
TEST_F(Exhaustion, AnotherContextIsNotStarved) {
  CUcontext primary = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&primary));
  free_all(fill_device(share(48)));
  CUcontext other = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxCreate(&other, 0, 0));
  const CUdeviceptr p = allocate(device_memory() / 2 / (2 * MiB) * (2 * MiB));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(other));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
}

// CUSHION_MAX_SIZE bounds what the pool holds, not what the program may have.
// Under CUSHION_LIMIT=256MiB the device is as large as that, whoever serves.
SCENARIO(has_a_limit) {
  std::size_t free = 0, total = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemGetInfo(&free, &total));
  EXPECT_EQ(total, 256 * MiB);
  EXPECT_EQ(free, 256 * MiB);
  CHECK_CU(CUDA_SUCCESS, driver().DeviceTotalMem(&total, 0));
  EXPECT_EQ(total, 256 * MiB);
  const Stream stream;
  const CUdeviceptr half = allocate(128 * MiB);
  CHECK_CU(CUDA_SUCCESS, driver().MemGetInfo(&free, &total));
  EXPECT_EQ(free, 128 * MiB);
  CUdeviceptr p = 0, q = 0;
  std::size_t pitch = 0;
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAlloc(&p, 130 * MiB));
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAllocAsync(&p, 130 * MiB, stream));
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAllocPitch(&p, &pitch, MiB, 130, 4));
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocManaged(&q, 512 * MiB, CU_MEM_ATTACH_GLOBAL));  // may lie on the host
  CHECK_CU(CUDA_SUCCESS, driver().MemAlloc(&p, 120 * MiB));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(half));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(q));
  p = allocate_async(250 * MiB, stream);  // what the pool held goes back for it
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
  finish(stream);
}

// Whatever threads ask for at once: as much as the limit allows, and no more.
SCENARIO(threads_share_a_limit) {
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::atomic<std::size_t> live{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      CUdeviceptr p = 0;
      for (const std::size_t size = (i + 1) * 2 * MiB; driver().MemAlloc(&p, size) == CUDA_SUCCESS;) live += size;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(live, 256 * MiB);
  EXPECT_GE(live, 128 * MiB);
}

// A thread that is about to take all of it for the pool leaves nobody without: the others wait for it.
SCENARIO(threads_begin_under_a_limit) {
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&context));
  std::latch start{4};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(context));
      start.arrive_and_wait();
      for (int round = 0; round < 8; ++round) allocate(4 * MiB);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Exhaustion, TheLimitIsTheDevice) {
  if (!under_cushion()) GTEST_SKIP() << "it is Cushion's";
  EXPECT_SCENARIO("has_a_limit", {"CUSHION_LIMIT=256MiB"});
  EXPECT_SCENARIO("threads_share_a_limit", {"CUSHION_LIMIT=256MiB"});
  EXPECT_SCENARIO("threads_begin_under_a_limit", {"CUSHION_LIMIT=256MiB", "CUSHION_INITIAL_SIZE=100%"});
}

SCENARIO(sees_the_device) {
  std::size_t free = 0, total = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(MiB)));
  CHECK_CU(CUDA_SUCCESS, driver().MemGetInfo(&free, &total));
  EXPECT_GT(total, 256 * MiB);
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAlloc(&p, 300 * MiB));
}

TEST_F(Exhaustion, TheLimitNeedNotBeShown) {
  if (!under_cushion()) GTEST_SKIP() << "it is Cushion's";
  EXPECT_SCENARIO("sees_the_device", {"CUSHION_LIMIT=256MiB", "CUSHION_LIMIT_SHOWN=device"});
}

SCENARIO(more_than_max_size) {
  std::vector<CUdeviceptr> blocks(40);
  for (CUdeviceptr& p : blocks) p = allocate(8 * MiB);
  blocks.push_back(allocate(200 * MiB));
  for (const CUdeviceptr p : blocks) write_ends(p, 8 * MiB);
  free_all(blocks);
}

TEST_F(Exhaustion, MaxSizeBoundsThePoolNotTheProgram) {
  if (!pooled()) GTEST_SKIP() << "an option of Cushion's pool";
  const Scratch scratch;
  EXPECT_SCENARIO("more_than_max_size", {"CUSHION_MAX_SIZE=128MiB", "CUSHION_REPORT=" + scratch.path("report.json")});
  const nlohmann::json report = scratch.report("report.json");
  ASSERT_FALSE(report.is_null());
  EXPECT_LE(report["devices"][0]["held"]["peak"].get<std::size_t>(), 128 * MiB);
  EXPECT_GT(report["calls"]["served"].get<std::size_t>(), 0U);
  EXPECT_GT(report["calls"]["forwarded"].get<std::size_t>(), 0U);
}

}  // namespace
