// Holds the driver to the rules of the contract that Cushion rests on.
//
// It runs on the emulated driver in ctest, and by hand on a GPU (without LD_LIBRARY_PATH): a rule that fails on one of
// them only is a fault of the emulator, or a wrong line in the contract. That a call waits is seen
// by the clock, from below; that it does not, by a kernel that spins until the test opens a gate after the call.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <thread>

#include "tests/harness/child.h"
#include "tests/harness/gpu.h"
#include "tests/harness/launch.h"

namespace {

using namespace harness;

constexpr std::uint64_t kHold = 20 * kMillisecond;

#define EXPECT_WAITED(watch) EXPECT_GE((watch).Milliseconds(), 15)

// Holds streams until it is opened.
class Gate {
 public:
  ~Gate() { Open(); }
  CUresult Hold(CUstream stream) const { return LaunchWaitFlag(stream, word_.on_device()); }
  void Open() { word_.Set(1); }

 private:
  SharedWord word_;
};

std::size_t FreeMemory() {
  std::size_t free = 0, total = 0;
  CHECK_CU(0, driver().MemGetInfo(&free, &total));
  return free;
}

// A test whose kernels are loaded, and whose context has seen work.
class WithKernels : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    REQUIRE_CU(0, LoadKernels());
    REQUIRE_CU(0, LaunchHold(nullptr, 0));
    REQUIRE_CU(0, driver().CtxSynchronize());
  }
};

// ---------------------------------------------------------------------------------------------- §2, values

class Memory : public WithKernels {};

TEST_F(Memory, AllocAndFreeAnswer) {
  const Driver& cu = driver();
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemAlloc(&p, 0));
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, cu.MemAlloc(&p, std::size_t{1} << 50));
  REQUIRE_CU(0, cu.MemAlloc(&p, 1000));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p + 512));
  CHECK_CU(0, cu.MemFree(p));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p));
  int on_stack = 0;
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(reinterpret_cast<CUdeviceptr>(&on_stack)));
}

TEST_F(Memory, AlignmentIs512ThenWholePages) {
  DeviceBlock small(1), odd(700), large((1 << 20) + 1);
  EXPECT_EQ(small % 512, 0U);
  EXPECT_EQ(odd % 512, 0U);
  EXPECT_EQ(large % (2 << 20), 0U);
}

TEST_F(Memory, FootprintIsWholePagesAboveOneMebibyte) {
  const std::size_t before = FreeMemory();
  DeviceBlock one((1 << 20) + 1);
  const std::size_t between = FreeMemory();
  DeviceBlock two((2 << 20) + 1);
  EXPECT_EQ(before - between, 2U << 20);
  EXPECT_EQ(between - FreeMemory(), 4U << 20);
}

TEST_F(Memory, NewMemoryIsZeroAfterFreeToo) {
  for (const std::size_t size : {std::size_t{1000}, std::size_t{3} << 20}) {
    for (int round = 0; round < 2; ++round) {
      DeviceBlock block(size);
      EXPECT_TRUE(Bytes(block, size) == std::vector<std::uint8_t>(size, 0)) << size;
      CHECK_CU(0, driver().MemsetD8(block, 0xab, size));
    }
  }
}

TEST_F(Memory, RangeAndAttributesAreTheBlocks) {
  const Driver& cu = driver();
  DeviceBlock block(1000);
  CUdeviceptr base = 0, p = 0;
  std::size_t size = 0;
  CHECK_CU(0, cu.MemGetAddressRange(&base, &size, block + 999));
  EXPECT_EQ(base, block);
  EXPECT_EQ(size, 1000U);
  int capable = -1;
  CHECK_CU(0, cu.PointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, block));
  EXPECT_EQ(capable, 1);
  REQUIRE_CU(0, cu.MemAllocAsync(&p, 1000, nullptr));
  CHECK_CU(0, cu.PointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
  EXPECT_EQ(capable, 0);
  CHECK_CU(0, cu.MemFreeAsync(p, nullptr));
}

TEST_F(Memory, HandleForOtherProcessesIsTheBases) {
  DeviceBlock block(4 << 20);
  CUipcMemHandle base, inside;
  CHECK_CU(0, driver().IpcGetMemHandle(&base, block));
  CHECK_CU(0, driver().IpcGetMemHandle(&inside, block + (1 << 20)));
  EXPECT_TRUE(std::equal(std::begin(base.reserved), std::end(base.reserved), std::begin(inside.reserved)));
}

TEST_F(Memory, FreeWorksWithNoContextCurrent) {
  DeviceBlock block(1000);
  CHECK_CU(0, driver().CtxSetCurrent(nullptr));
  CHECK_CU(0, driver().MemFree(block.Release()));
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_ERROR_INVALID_CONTEXT, driver().MemAlloc(&p, 1000));
  CHECK_CU(0, driver().CtxSetCurrent(context()));
}

TEST_F(Memory, PitchedRowsAreAligned) {
  CUdeviceptr p = 0;
  std::size_t pitch = 0;
  REQUIRE_CU(0, driver().MemAllocPitch(&p, &pitch, 700, 10, 4));
  EXPECT_EQ(pitch, 1024U);
  CHECK_CU(0, driver().MemFree(p));
}

TEST_F(Memory, ManagedMemoryIsSeenByBothSides) {
  CUdeviceptr p = 0;
  REQUIRE_CU(0, driver().MemAllocManaged(&p, 4096, CU_MEM_ATTACH_GLOBAL));
  CHECK_CU(0, LaunchFill(nullptr, p, 4096, 7));
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(*reinterpret_cast<std::uint8_t*>(p), 7);
  CHECK_CU(0, driver().MemFree(p));
}

TEST_F(Memory, MappedMemoryIsOneBlockOfBytes) {
  const Driver& cu = driver();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device()};
  std::size_t unit = 0;
  REQUIRE_CU(0, cu.MemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle first = 0, second = 0;
  CUdeviceptr p = 0;
  REQUIRE_CU(0, cu.MemAddressReserve(&p, 2 * unit, 0, 0, 0));
  REQUIRE_CU(0, cu.MemCreate(&first, unit, &properties, 0));
  REQUIRE_CU(0, cu.MemCreate(&second, unit, &properties, 0));
  CHECK_CU(0, cu.MemMap(p, unit, 0, first, 0));
  CHECK_CU(0, cu.MemMap(p + unit, unit, 0, second, 0));
  CHECK_CU(0, cu.MemRelease(first));
  CHECK_CU(0, cu.MemRelease(second));
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  REQUIRE_CU(0, cu.MemSetAccess(p, 2 * unit, &access, 1));
  CHECK_CU(0, LaunchFill(nullptr, p + unit - 8, 16, 9));
  CHECK_CU(0, cu.CtxSynchronize());
  EXPECT_EQ(Bytes(p + unit - 8, 8), std::vector<std::uint8_t>(8, 9));
  CHECK_CU(0, cu.MemUnmap(p, 2 * unit));
  CHECK_CU(0, cu.MemAddressFree(p, 2 * unit));
}

// A pool of the test's own, its threshold so high that a synchronisation gives nothing back.
class OwnPool {
 public:
  OwnPool() {
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CHECK_CU(0, driver().MemPoolCreate(&pool_, &properties));
    cuuint64_t threshold = UINT64_MAX;
    CHECK_CU(0, driver().MemPoolSetAttribute(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  }
  ~OwnPool() { CHECK_CU(0, driver().MemPoolDestroy(pool_)); }
  OwnPool(const OwnPool&) = delete;
  OwnPool& operator=(const OwnPool&) = delete;

  CUdeviceptr Allocate(std::size_t size, CUstream stream) const {
    CUdeviceptr p = 0;
    CHECK_CU(0, driver().MemAllocFromPoolAsync(&p, size, pool_, stream));
    return p;
  }
  cuuint64_t used() const { return Figure(CU_MEMPOOL_ATTR_USED_MEM_CURRENT); }
  cuuint64_t reserved() const { return Figure(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); }
  CUresult Trim() const { return driver().MemPoolTrimTo(pool_, 0); }

 private:
  cuuint64_t Figure(CUmemPool_attribute attribute) const {
    cuuint64_t value = 0;
    CHECK_CU(0, driver().MemPoolGetAttribute(pool_, attribute, &value));
    return value;
  }
  CUmemoryPool pool_ = nullptr;
};

TEST_F(Memory, APoolAlignsTo512) {
  const OwnPool pool;
  Stream stream;
  const CUdeviceptr small = pool.Allocate(1, stream), large = pool.Allocate((1 << 20) + 1, stream);
  EXPECT_EQ(large, small + 512);
  EXPECT_EQ(pool.used(), 1U + (1U << 20) + 1U) << "as requested";
  for (const CUdeviceptr p : {small, large}) CHECK_CU(0, driver().MemFreeAsync(p, stream));
  CHECK_CU(0, stream.Synchronize());
}

TEST_F(Memory, APoolGivesBackWhatTheHostHasSynchronisedWith) {
  const OwnPool pool;
  Stream stream;
  CHECK_CU(0, driver().MemFreeAsync(pool.Allocate(64 << 20, stream), stream));
  CHECK_CU(0, pool.Trim());
  EXPECT_GE(pool.reserved(), 64U << 20);
  CHECK_CU(0, stream.Synchronize());
  EXPECT_EQ(pool.used(), 0U);
  CHECK_CU(0, pool.Trim());
  EXPECT_EQ(pool.reserved(), 0U);
}

// cuMemFree is on no stream: no synchronisation tells the pool of it.
TEST_F(Memory, APoolLearnsOfASynchronousFreeWhenItGrows) {
  const OwnPool pool;
  Stream stream;
  CHECK_CU(0, driver().MemFree(pool.Allocate(1000, stream)));
  CHECK_CU(0, driver().CtxSynchronize());
  EXPECT_EQ(pool.used(), 1000U);
  const CUdeviceptr large = pool.Allocate(64 << 20, stream);
  EXPECT_EQ(pool.used(), 64U << 20);
  CHECK_CU(0, driver().MemFreeAsync(large, stream));
  CHECK_CU(0, stream.Synchronize());
}

TEST_F(Memory, APoolsMemoryOutlivesAContextTheProgramMade) {
  const OwnPool pool;
  CUcontext made = nullptr;
  REQUIRE_CU(0, driver().CtxCreate(&made, 0, device()));
  CUdeviceptr p = 0;
  {
    Stream stream;
    p = pool.Allocate(64 << 20, stream);
    CHECK_CU(0, stream.Synchronize());
  }
  CHECK_CU(0, driver().CtxDestroy(made));
  REQUIRE_CU(0, driver().CtxSetCurrent(context()));
  EXPECT_EQ(pool.used(), 64U << 20);
  Stream stream;
  CHECK_CU(0, driver().MemsetD8Async(p, 1, 64 << 20, stream));
  CHECK_CU(0, driver().MemFreeAsync(p, stream));
  CHECK_CU(0, stream.Synchronize());
  EXPECT_EQ(pool.used(), 0U);
}

TEST_F(Memory, RunsOutAndComesBack) {
  const auto body = [] {
    Gpu gpu;
    std::vector<CUdeviceptr> blocks;
    CUdeviceptr p = 0;
    while (driver().MemAlloc(&p, 16 << 20) == CUDA_SUCCESS) blocks.push_back(p);
    EXPECT_EQ(blocks.size(), 4U);
    CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAllocAsync(&p, 16 << 20, nullptr));
    CHECK_CU(0, driver().MemFree(blocks.back()));
    CHECK_CU(0, driver().MemAllocAsync(&p, 16 << 20, nullptr));
    return 0;
  };
  if (!Driver::Emulated()) GTEST_SKIP() << "needs a device of 64 MiB";
  const ChildResult child = RunChild("full", body, {{"EMU_MEMORY", "64M"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

// ---------------------------------------------------------------------------------------------- §3, order

class Order : public WithKernels {};

TEST_F(Order, FreeWaitsForEveryKindOfStream) {
  const Driver& cu = driver();
  Stream blocking(CU_STREAM_DEFAULT), other(CU_STREAM_NON_BLOCKING);
  for (const CUstream stream : {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream{blocking}, CUstream{other}}) {
    DeviceBlock block(1 << 20);
    Stopwatch watch;
    CHECK_CU(0, LaunchHold(stream, kHold));
    CHECK_CU(0, cu.MemFree(block.Release()));
    EXPECT_WAITED(watch);
  }
}

TEST_F(Order, FreesOfHostAndManagedMemoryWaitToo) {
  const Driver& cu = driver();
  Stream stream;
  void* host = nullptr;
  CUdeviceptr managed = 0;
  REQUIRE_CU(0, cu.MemHostAlloc(&host, 4096, 0));
  REQUIRE_CU(0, cu.MemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  Stopwatch watch;
  CHECK_CU(0, LaunchHold(stream, kHold));
  CHECK_CU(0, cu.MemFreeHost(host));
  EXPECT_WAITED(watch);
  watch.Restart();
  CHECK_CU(0, LaunchHold(stream, kHold));
  CHECK_CU(0, cu.MemFree(managed));
  EXPECT_WAITED(watch);
}

TEST_F(Order, FreeWaitsForTheBlocksOwnContextOnly) {
  const Driver& cu = driver();
  DeviceBlock block(1 << 20);
  CUcontext second = nullptr;
  REQUIRE_CU(0, cu.CtxCreate(&second, 0, device()));
  {
    Gate gate;
    Stream busy;
    CHECK_CU(0, gate.Hold(busy));
    CHECK_CU(0, cu.MemFree(block.Release()));
    CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(busy));
    gate.Open();
    CHECK_CU(0, busy.Synchronize());
  }
  CHECK_CU(0, cu.CtxDestroy(second));
}

TEST_F(Order, AllocationsAndAsyncFreesReturnAtOnce) {
  const Driver& cu = driver();
  Gate gate;
  Stream stream;
  CUdeviceptr pooled = 0, pooled_too = 0, p = 0;
  REQUIRE_CU(0, cu.MemAllocAsync(&pooled, 1 << 20, stream));
  REQUIRE_CU(0, cu.MemAllocAsync(&pooled_too, 1 << 20, stream));
  DeviceBlock block(1 << 20);
  CHECK_CU(0, gate.Hold(stream));
  CHECK_CU(0, cu.MemAlloc(&p, 1 << 20));
  CHECK_CU(0, cu.MemFreeAsync(block.Release(), stream));
  CHECK_CU(0, cu.MemFreeAsync(pooled, stream));
  CHECK_CU(0, cu.MemFree(pooled_too));
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(stream));
  gate.Open();
  CHECK_CU(0, stream.Synchronize());
  CHECK_CU(0, cu.MemFree(p));
}

TEST_F(Order, ElapsedTimeIsThereAfterFree) {
  const Driver& cu = driver();
  Stream stream;
  Event start(CU_EVENT_DEFAULT), end(CU_EVENT_DEFAULT);
  DeviceBlock block(1 << 20);
  CHECK_CU(0, cu.EventRecord(start, stream));
  CHECK_CU(0, LaunchHold(stream, kHold));
  CHECK_CU(0, cu.EventRecord(end, stream));
  float milliseconds = 0;
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.EventElapsedTime(&milliseconds, start, end));
  CHECK_CU(0, cu.MemFree(block.Release()));
  CHECK_CU(0, cu.EventElapsedTime(&milliseconds, start, end));
  EXPECT_GE(milliseconds, 15);
}

TEST_F(Order, LegacyStreamOrdersBlockingStreams) {
  const Driver& cu = driver();
  Gate gate;
  Stream blocking(CU_STREAM_DEFAULT), independent;
  CHECK_CU(0, gate.Hold(nullptr));
  CHECK_CU(0, LaunchHold(blocking, 0));
  CHECK_CU(0, LaunchHold(CU_STREAM_PER_THREAD, 0));
  CHECK_CU(0, LaunchHold(independent, 0));
  CHECK_CU(0, independent.Synchronize());
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(blocking));
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(CU_STREAM_PER_THREAD));
  gate.Open();
  CHECK_CU(0, blocking.Synchronize());
  CHECK_CU(0, cu.StreamSynchronize(CU_STREAM_PER_THREAD));
  CHECK_CU(0, cu.StreamQuery(CU_STREAM_LEGACY));

  Stopwatch watch;
  CHECK_CU(0, LaunchHold(blocking, kHold));
  CHECK_CU(0, LaunchHold(nullptr, 0));
  CHECK_CU(0, cu.StreamSynchronize(nullptr));
  EXPECT_WAITED(watch);
}

TEST_F(Order, ContextEventCoversEveryStreamAndOrdersNothing) {
  const Driver& cu = driver();
  if (cu.CtxRecordEvent == nullptr) GTEST_SKIP() << "the driver has no cuCtxRecordEvent";
  Stream blocking(CU_STREAM_DEFAULT), independent;
  Event event;
  for (const CUstream stream : {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream{blocking}, CUstream{independent}}) {
    Gate gate;
    CHECK_CU(0, gate.Hold(stream));
    CHECK_CU(0, cu.CtxRecordEvent(context(), event));
    CHECK_CU(CUDA_ERROR_NOT_READY, cu.EventQuery(event));
    gate.Open();
    CHECK_CU(0, cu.EventSynchronize(event));
    CHECK_CU(0, cu.StreamQuery(stream));
    CHECK_CU(0, cu.EventQuery(event));
  }
  Gate gate;
  CHECK_CU(0, gate.Hold(independent));
  CHECK_CU(0, cu.CtxRecordEvent(context(), event));
  CHECK_CU(0, LaunchHold(blocking, 0));
  CHECK_CU(0, blocking.Synchronize());
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.EventQuery(event));
  CHECK_CU(0, cu.StreamWaitEvent(blocking, event, 0));
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(blocking));
  gate.Open();
  CHECK_CU(0, blocking.Synchronize());
  CHECK_CU(0, cu.EventQuery(event));
}

TEST_F(Order, LegacyEventMissesNonBlockingStreams) {
  const Driver& cu = driver();
  Gate gate;
  Stream independent;
  Event event;
  CHECK_CU(0, gate.Hold(independent));
  CHECK_CU(0, cu.EventRecord(event, CU_STREAM_LEGACY));
  CHECK_CU(0, cu.EventSynchronize(event));
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(independent));
  gate.Open();
  CHECK_CU(0, independent.Synchronize());
}

TEST_F(Order, LegacyEventHoldsBlockingStreamsBack) {
  const Driver& cu = driver();
  Gate gate;
  Stream busy(CU_STREAM_DEFAULT), next(CU_STREAM_DEFAULT);
  Event event;
  CHECK_CU(0, gate.Hold(busy));
  CHECK_CU(0, cu.EventRecord(event, CU_STREAM_LEGACY));
  Stopwatch watch;
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kHold));
    gate.Open();
  });
  CHECK_CU(0, LaunchHold(next, 0));
  CHECK_CU(0, next.Synchronize());
  EXPECT_WAITED(watch);
  opener.join();
}

TEST_F(Order, WaitTakesTheEventAsItIsAtTheCall) {
  const Driver& cu = driver();
  Gate gate;
  Stream first, second, third;
  Event event;
  CHECK_CU(0, cu.EventRecord(event, first));
  CHECK_CU(0, cu.StreamWaitEvent(second, event, 0));
  CHECK_CU(0, gate.Hold(first));
  CHECK_CU(0, cu.EventRecord(event, first));
  CHECK_CU(0, cu.StreamWaitEvent(third, event, 0));
  CHECK_CU(0, cu.EventRecord(event, second));  // and what is recorded later does not matter
  CHECK_CU(0, second.Synchronize());
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(third));
  gate.Open();
  CHECK_CU(0, third.Synchronize());
  CHECK_CU(0, cu.StreamQuery(first));
}

TEST_F(Order, DestroyedStreamFinishesAndItsHandleComesAgain) {
  const Driver& cu = driver();
  if (cu.StreamGetId == nullptr || cu.CtxRecordEvent == nullptr) GTEST_SKIP() << "the driver is older than 12.5";
  DeviceBlock block(64);
  Gate gate;
  std::optional<Stream> old(std::in_place);
  const CUstream handle = *old;
  unsigned long long old_id = 0, new_id = 0;
  CHECK_CU(0, cu.StreamGetId(handle, &old_id));
  CHECK_CU(0, gate.Hold(handle));
  CHECK_CU(0, LaunchFill(handle, block, 64, 5));
  old.reset();
  Event event;
  CHECK_CU(0, cu.CtxRecordEvent(context(), event));
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.EventQuery(event));
  gate.Open();
  CHECK_CU(0, cu.EventSynchronize(event));
  EXPECT_EQ(Bytes(block, 64), std::vector<std::uint8_t>(64, 5));
  Stream fresh;
  EXPECT_EQ(CUstream{fresh}, handle);
  CHECK_CU(0, cu.StreamGetId(fresh, &new_id));
  EXPECT_NE(new_id, old_id);
}

TEST_F(Order, HandlesZeroAndOneAreOneStream) {
  const Driver& cu = driver();
  if (cu.StreamGetId == nullptr) GTEST_SKIP() << "the driver has no cuStreamGetId";
  unsigned long long zero = 0, one = 1, own = 2, of_another = 3;
  CHECK_CU(0, cu.StreamGetId(nullptr, &zero));
  CHECK_CU(0, cu.StreamGetId(CU_STREAM_LEGACY, &one));
  CHECK_CU(0, cu.StreamGetId(CU_STREAM_PER_THREAD, &own));
  std::thread([&] {
    CHECK_CU(0, cu.CtxSetCurrent(context()));
    CHECK_CU(0, cu.StreamGetId(CU_STREAM_PER_THREAD, &of_another));
  }).join();
  EXPECT_EQ(zero, one);
  EXPECT_NE(own, zero);
  EXPECT_NE(own, of_another);
}

// Work that is still to come on a freed block reaches all of it, though a smaller block of the stream has its place.
TEST_F(Order, WorkReachesItsBlockAfterTheStreamHasGivenItsPlaceAway) {
  const Driver& cu = driver();
  const Stream stream;
  for (const std::size_t smaller : {std::size_t{5000}, std::size_t{8000}}) {
    CUdeviceptr p = 0, q = 0;
    CHECK_CU(0, cu.MemAllocAsync(&p, 8192, stream));
    CHECK_CU(0, LaunchHold(stream, 20 * kMillisecond));
    CHECK_CU(0, LaunchFill(stream, p, 8192, 1));
    CHECK_CU(0, cu.MemFreeAsync(p, stream));
    CHECK_CU(0, cu.MemAllocAsync(&q, smaller, stream));
    if (Driver::Emulated()) {
      EXPECT_EQ(p, q) << "the test wants the place again";
    }
    CHECK_CU(0, cu.MemFreeAsync(q, stream));
    CHECK_CU(0, stream.Synchronize());
  }
}

TEST_F(Order, PoolGivesABusyBlockToItsOwnStreamOnly) {
  const Driver& cu = driver();
  Gate gate;
  Stream freed_on, independent, ordered;
  CUdeviceptr p = 0, same = 0, other = 0, after = 0;
  REQUIRE_CU(0, cu.MemAllocAsync(&p, 8 << 20, freed_on));
  CHECK_CU(0, gate.Hold(freed_on));
  CHECK_CU(0, cu.MemFreeAsync(p, freed_on));
  CHECK_CU(0, cu.MemAllocAsync(&other, 8 << 20, independent));
  EXPECT_NE(other, p);
  CHECK_CU(0, cu.MemAllocAsync(&same, 8 << 20, freed_on));
  EXPECT_EQ(same, p);
  CHECK_CU(0, cu.MemFreeAsync(same, freed_on));
  Event event;
  CHECK_CU(0, cu.EventRecord(event, freed_on));
  CHECK_CU(0, cu.StreamWaitEvent(ordered, event, 0));
  CHECK_CU(0, cu.MemAllocAsync(&after, 8 << 20, ordered));
  EXPECT_EQ(after, p);
  CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(freed_on));
  gate.Open();
  CHECK_CU(0, cu.MemFreeAsync(after, ordered));
  CHECK_CU(0, cu.MemFreeAsync(other, independent));
  CHECK_CU(0, cu.CtxSynchronize());
}

TEST_F(Order, OnAFullDeviceABusyBlockGoesToAnotherStreamThatWaits) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    CHECK_CU(0, harness::LoadKernels());
    CUmemoryPool pool = nullptr;
    CHECK_CU(0, cu.DeviceGetDefaultMemPool(&pool, 0));
    Gate gate;
    Stream freed_on, independent;
    CUdeviceptr p = 0, same = 0, other = 0;
    CHECK_CU(0, cu.MemAllocAsync(&p, 40 << 20, freed_on));
    CHECK_CU(0, gate.Hold(freed_on));
    CHECK_CU(0, cu.MemFreeAsync(p, freed_on));
    int allowed = 0;
    CHECK_CU(0, cu.MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &allowed));
    CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, cu.MemAllocAsync(&other, 40 << 20, independent));
    allowed = 1;
    CHECK_CU(0, cu.MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &allowed));
    CHECK_CU(0, cu.MemAllocAsync(&same, 40 << 20, independent));
    EXPECT_EQ(same, p);
    CHECK_CU(CUDA_ERROR_NOT_READY, cu.StreamQuery(independent));
    gate.Open();
    CHECK_CU(0, independent.Synchronize());
    return 0;
  };
  if (!Driver::Emulated()) GTEST_SKIP() << "needs a device of 64 MiB";
  const ChildResult child = RunChild("full", body, {{"EMU_MEMORY", "64M"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Order, PerThreadVariantMeansThePerThreadStream) {
  const Driver& cu = driver();
  Stream independent;
  CUdeviceptr p = 0;
  Gate gate;
  CHECK_CU(0, gate.Hold(CU_STREAM_PER_THREAD));
  REQUIRE_CU(0, cu.MemAllocAsync_ptsz(&p, 1 << 20, nullptr));
  CHECK_CU(0, cu.MemFreeAsync_ptsz(p, nullptr));
  CUdeviceptr elsewhere = 0, here = 0;
  CHECK_CU(0, cu.MemAllocAsync(&elsewhere, 1 << 20, independent));
  EXPECT_NE(elsewhere, p);
  CHECK_CU(0, cu.MemAllocAsync(&here, 1 << 20, CU_STREAM_PER_THREAD));
  EXPECT_EQ(here, p);
  gate.Open();
  CHECK_CU(0, cu.MemFreeAsync(elsewhere, independent));
  CHECK_CU(0, cu.MemFreeAsync(here, CU_STREAM_PER_THREAD));
  CHECK_CU(0, cu.CtxSynchronize());
}

TEST_F(Order, ManyThreadsKeepTheirBytes) {
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> wrong = 0;
  for (std::uint32_t value = 1; value <= 4; ++value) {
    threads.emplace_back([this, value, &wrong] {
      const Driver& cu = driver();
      CHECK_CU(0, cu.CtxSetCurrent(context()));
      Stream stream;
      SharedWord bad;
      for (int round = 0; round < 50; ++round) {
        CUdeviceptr p = 0;
        const std::size_t size = 1000U * value;
        CHECK_CU(0, cu.MemAllocAsync(&p, size, stream));
        CHECK_CU(0, LaunchFillHoldCheck(stream, p, size, value, kMillisecond / 10, bad.on_device()));
        CHECK_CU(0, cu.MemFreeAsync(p, stream));
      }
      CHECK_CU(0, stream.Synchronize());
      wrong += bad.Get();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U);
}

// ---------------------------------------------------------------------------------------------- §2, host functions

void CUDA_CB AllocateInside(void* result) {
  CUdeviceptr p = 0;
  *static_cast<CUresult*>(result) = driver().MemAlloc(&p, 100);
}

TEST_F(Order, HostFunctionRunsInOrderAndMayNotCall) {
  Stream stream;
  CUresult inside = CUDA_SUCCESS;
  CHECK_CU(0, LaunchHold(stream, kHold));
  CHECK_CU(0, driver().LaunchHostFunc(stream, AllocateInside, &inside));
  CHECK_CU(0, stream.Synchronize());
  EXPECT_EQ(inside, CUDA_ERROR_NOT_PERMITTED);
}

// ---------------------------------------------------------------------------------------------- §4, capture

class Capture : public WithKernels, public testing::WithParamInterface<CUstreamCaptureMode> {
 protected:
  // Begins a capture, makes the call, and returns what ending the capture answers.
  template <class Call>
  CUresult EndAfter(CUstreamCaptureMode mode, Call call, unsigned flags = CU_STREAM_NON_BLOCKING) {
    Stream stream(flags);
    CHECK_CU(0, driver().StreamBeginCapture(stream, mode));
    CHECK_CU(0, LaunchHold(stream, 0));
    call(stream);
    CUgraph graph = nullptr;
    const CUresult result = driver().StreamEndCapture(stream, &graph);
    if (graph != nullptr) driver().GraphDestroy(graph);
    return result;
  }

  template <class Call>
  void InAnotherThread(Call call) {
    std::thread([&] {
      CHECK_CU(0, driver().CtxSetCurrent(context()));
      call();
    }).join();
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, Capture,
                         testing::Values(CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));

TEST_P(Capture, UnsafeCallsOfTheCapturingThreadBreakIt) {
  const Driver& cu = driver();
  Stream other;
  Event event;
  CUdeviceptr p = 0;
  CUmemoryPool pool = nullptr;
  cuuint64_t figure = 0;
  CHECK_CU(0, cu.DeviceGetDefaultMemPool(&pool, device()));
  CHECK_CU(0, cu.EventRecord(event, other));
  DeviceBlock block(1000);
  struct Unsafe {
    const char* name;
    std::function<CUresult()> call;
  };
  const std::vector<Unsafe> calls{
      {"cuMemAlloc", [&] { return cu.MemAlloc(&p, 100); }},
      {"cuMemFree", [&] { return cu.MemFree(block); }},
      {"cuCtxSynchronize", [&] { return cu.CtxSynchronize(); }},
      {"cuEventQuery", [&] { return cu.EventQuery(event); }},
      {"cuStreamQuery", [&] { return cu.StreamQuery(other); }},
      {"cuMemAllocAsync", [&] { return cu.MemAllocAsync(&p, 100, other); }},
      {"cuMemPoolGetAttribute",
       [&] { return cu.MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &figure); }},
  };
  for (const Unsafe& unsafe : calls) {
    SCOPED_TRACE(unsafe.name);
    const auto refused = [&](CUstream) { CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, unsafe.call()); };
    CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, EndAfter(GetParam(), refused));
  }
}

TEST_P(Capture, RelaxedThreadIsHarmless) {
  const Driver& cu = driver();
  Stream other;
  Event event;
  CHECK_CU(0, cu.EventRecord(event, other));
  CHECK_CU(0, EndAfter(GetParam(), [&](CUstream) {
             CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
             CHECK_CU(0, cu.ThreadExchangeStreamCaptureMode(&mode));
             CUdeviceptr p = 0;
             CHECK_CU(0, cu.MemAlloc(&p, 100));
             Stopwatch watch;
             CHECK_CU(0, LaunchHold(other, kHold));
             CHECK_CU(0, cu.MemFree(p));
             EXPECT_WAITED(watch);
             CHECK_CU(0, cu.EventQuery(event));
             CHECK_CU(0, cu.EventSynchronize(event));
             CHECK_CU(0, cu.ThreadExchangeStreamCaptureMode(&mode));
             EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
           }));
}

TEST_P(Capture, AnotherThreadsFreeBreaksGlobalCapturesOnly) {
  const bool global = GetParam() == CU_STREAM_CAPTURE_MODE_GLOBAL;
  DeviceBlock block(1000);
  CHECK_CU(global ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, EndAfter(GetParam(), [&](CUstream) {
             InAnotherThread([&] {
               const CUresult result = driver().MemFree(block);
               CHECK_CU(global ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS, result);
               if (result == CUDA_SUCCESS) block.Release();
             });
           }));
}

TEST_P(Capture, SynchronizingOrRecordingTheContextBreaksIt) {
  const Driver& cu = driver();
  CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, EndAfter(GetParam(), [&](CUstream) {
             InAnotherThread([&] { CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.CtxSynchronize()); });
           }));
  if (cu.CtxRecordEvent == nullptr) return;
  Event event;
  CHECK_CU(
      CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, EndAfter(GetParam(), [&](CUstream) {
        InAnotherThread([&] { CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.CtxRecordEvent(context(), event)); });
      }));
}

TEST_P(Capture, MemoryInfoAndRecordsElsewhereAreHarmless) {
  Stream other;
  Event event;
  CHECK_CU(0, EndAfter(GetParam(), [&](CUstream) {
             FreeMemory();
             CHECK_CU(0, driver().EventRecord(event, other));
           }));
}

TEST_P(Capture, LegacyStreamBreaksCapturesOfBlockingStreams) {
  Event event;
  const auto record = [&](CUresult expected) {
    return [&event, expected](CUstream) { CHECK_CU(expected, driver().EventRecord(event, CU_STREAM_LEGACY)); };
  };
  CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
           EndAfter(GetParam(), record(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT), CU_STREAM_DEFAULT));
  CHECK_CU(0, EndAfter(GetParam(), record(CUDA_SUCCESS), CU_STREAM_NON_BLOCKING));
}

TEST_P(Capture, AsyncFreeOfOutsideMemoryAnswersOneAndHarmsNothing) {
  DeviceBlock block(1000);
  CHECK_CU(0, EndAfter(GetParam(), [&](CUstream stream) {
             CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(block, stream));
           }));
}

TEST_P(Capture, GraphRepeatsTheWorkWithItsOwnMemory) {
  const Driver& cu = driver();
  Stream stream, side;
  Event fork, join;
  DeviceBlock result(64);
  CHECK_CU(0, cu.StreamBeginCapture(stream, GetParam()));
  CUdeviceptr p = 0;
  CHECK_CU(0, cu.MemAllocAsync(&p, 64, stream));
  CHECK_CU(0, LaunchFill(stream, p, 64, 3));
  CHECK_CU(0, cu.EventRecord(fork, stream));
  CHECK_CU(0, cu.StreamWaitEvent(side, fork, 0));
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CHECK_CU(0, cu.StreamIsCapturing(side, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK_CU(0, LaunchCopy(side, result, p, 64));
  CHECK_CU(0, cu.EventRecord(join, side));
  CHECK_CU(0, cu.StreamWaitEvent(stream, join, 0));
  CHECK_CU(0, cu.MemFreeAsync(p, stream));
  CUgraph graph = nullptr;
  REQUIRE_CU(0, cu.StreamEndCapture(stream, &graph));
  CUgraphExec exec = nullptr;
  REQUIRE_CU(0, cu.GraphInstantiateWithFlags(&exec, graph, 0));
  for (int round = 0; round < 2; ++round) {
    CHECK_CU(0, cu.MemsetD8Async(result, 0, 64, stream));
    CHECK_CU(0, cu.GraphLaunch(exec, stream));
    CHECK_CU(0, stream.Synchronize());
    EXPECT_EQ(Bytes(result, 64), std::vector<std::uint8_t>(64, 3));
  }
  CHECK_CU(0, cu.GraphExecDestroy(exec));
  CHECK_CU(0, cu.GraphDestroy(graph));
}

TEST_P(Capture, DestroyedStreamLeavesNoCaptureOpen) {
  const Driver& cu = driver();
  CUstream stream = nullptr;
  REQUIRE_CU(0, cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK_CU(0, cu.StreamBeginCapture(stream, GetParam()));
  CHECK_CU(0, cu.StreamDestroy(stream));
  CHECK_CU(0, cu.CtxSynchronize());
  DeviceBlock block(1000);
}

TEST_P(Capture, UnjoinedWorkIsRefused) {
  const Driver& cu = driver();
  Stream side;
  Event fork;
  CHECK_CU(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, EndAfter(GetParam(), [&](CUstream stream) {
             CHECK_CU(0, cu.EventRecord(fork, stream));
             CHECK_CU(0, cu.StreamWaitEvent(side, fork, 0));
             CHECK_CU(0, LaunchHold(side, 0));
           }));
}

// ---------------------------------------------------------------------------------------------- §2, contexts

class Contexts : public WithKernels {};

TEST_F(Contexts, ResetTakesEverythingAndBeginsAnew) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    unsigned long long before = 0, after = 0;
    CUdeviceptr p = 0;
    CUstream stream = nullptr;
    CHECK_CU(0, cu.CtxGetId(nullptr, &before));
    CHECK_CU(0, cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK_CU(0, cu.MemAlloc(&p, 64 << 20));
    CHECK_CU(0, cu.DevicePrimaryCtxReset(gpu.device));
    CUdeviceptr q = 0;
    EXPECT_NE(cu.MemAlloc(&q, 1000), CUDA_SUCCESS);
    CUcontext again = nullptr;
    CHECK_CU(0, cu.DevicePrimaryCtxRetain(&again, gpu.device));
    CHECK_CU(0, cu.CtxSetCurrent(again));
    CHECK_CU(0, cu.CtxGetId(nullptr, &after));
    EXPECT_NE(before, after);
    CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p));
    CHECK_CU(0, cu.MemAlloc(&q, 1000));
    CHECK_CU(0, cu.MemFree(q));
    CHECK_CU(0, cu.DevicePrimaryCtxRelease(gpu.device));
    return 0;
  };
  const ChildResult child = RunChild("reset", body);
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Contexts, AResetEmptiesTheDefaultPoolAndNoOther) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu.device};
    CUmemoryPool pool = nullptr, own = nullptr;
    CHECK_CU(0, cu.DeviceGetDefaultMemPool(&pool, gpu.device));
    CHECK_CU(0, cu.MemPoolCreate(&own, &properties));
    cuuint64_t keep = UINT64_MAX;
    for (const CUmemoryPool each : {pool, own})
      CHECK_CU(0, cu.MemPoolSetAttribute(each, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    std::size_t free = 0, reset = 0, total = 0;
    CHECK_CU(0, cu.MemGetInfo(&free, &total));
    for (const CUmemoryPool each : {pool, own}) {
      CUdeviceptr left = 0, cached = 0;
      CHECK_CU(0, cu.MemAllocFromPoolAsync(&left, 64 << 20, each, nullptr));
      CHECK_CU(0, cu.MemAllocFromPoolAsync(&cached, 64 << 20, each, nullptr));
      CHECK_CU(0, cu.MemFreeAsync(cached, nullptr));
    }
    CHECK_CU(0, cu.DevicePrimaryCtxReset(gpu.device));
    CUcontext again = nullptr;
    CHECK_CU(0, cu.DevicePrimaryCtxRetain(&again, gpu.device));
    CHECK_CU(0, cu.CtxSetCurrent(again));
    CHECK_CU(0, cu.MemGetInfo(&reset, &total));
    EXPECT_LE(reset, free - (128 << 20)) << "the program's own pool keeps all of it";
    EXPECT_GT(reset, free - (192 << 20));
    return 0;
  };
  const ChildResult child = RunChild("reset of pools", body);
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Contexts, DestroyedContextGivesItsMemoryBack) {
  const Driver& cu = driver();
  CUcontext second = nullptr;
  CUdeviceptr p = 0;
  REQUIRE_CU(0, cu.CtxCreate(&second, 0, device()));
  REQUIRE_CU(0, cu.MemAlloc(&p, 64 << 20));
  const std::size_t full = FreeMemory();
  CHECK_CU(0, cu.CtxDestroy(second));
  EXPECT_GE(FreeMemory(), full + (64 << 20));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, cu.MemFree(p));
  EXPECT_NE(cu.CtxSetCurrent(second), CUDA_SUCCESS);
}

TEST_F(Contexts, IllegalAddressSticksUntilReset) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    CUdeviceptr p = 0;
    std::size_t free = 0, total = 0;
    CHECK_CU(0, cu.MemAlloc(&p, 1000));
    CHECK_CU(0, LaunchFill(nullptr, 512, 64, 1));
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, cu.CtxSynchronize());
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, cu.MemFree(p));
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, cu.MemAlloc(&p, 1000));
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, cu.MemGetInfo(&free, &total));
    if (!Driver::Emulated()) return 0;
    CHECK_CU(0, cu.DevicePrimaryCtxReset(gpu.device));
    CHECK_CU(0, cu.DevicePrimaryCtxRetain(&gpu.context, gpu.device));
    CHECK_CU(0, cu.MemAlloc(&p, 1000));
    return 0;
  };
  const ChildResult child = RunChild("fault", body);
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Contexts, ForkedChildHasNoDriver) {
  const auto body = [] {
    Gpu gpu;
    const pid_t child = fork();
    if (child == 0) {
      CUdeviceptr p = 0;
      _exit(driver().MemAlloc(&p, 1000) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  const ChildResult child = RunChild("fork", body);
  EXPECT_EQ(child.status, 0) << child.output;
}

// ---------------------------------------------------------------------------------------------- §1, lookup

class Lookup : public GpuTest {};

TEST_F(Lookup, ProcAddressIsTheSymbol) {
  const Driver& cu = driver();
  struct Case {
    const char* symbol;
    const char* name;
    int version;
    cuuint64_t flags;
  };
  const Case cases[] = {
      {"cuMemAlloc_v2", "cuMemAlloc", 3020, 1},
      {"cuMemAlloc_v2", "cuMemAlloc", 12000, 2},
      {"cuMemFree_v2", "cuMemFree", 11000, 0},
      {"cuMemAllocAsync", "cuMemAllocAsync", 11020, 1},
      {"cuMemAllocAsync_ptsz", "cuMemAllocAsync", 11020, 2},
      {"cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD", 7000, 2},
      {"cuStreamBeginCapture", "cuStreamBeginCapture", 10000, 1},
      {"cuStreamBeginCapture_v2", "cuStreamBeginCapture", 10010, 1},
      {"cuStreamBeginCapture_v2_ptsz", "cuStreamBeginCapture", 12000, 2},
      {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease", 10000, 1},
      {"cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", 11000, 1},
      {"cuGetProcAddress", "cuGetProcAddress", 11030, 1},
      {"cuGetProcAddress_v2", "cuGetProcAddress", 12000, 1},
      {"cuLaunchKernel_ptsz", "cuLaunchKernel", 7000, 2},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.symbol);
    void* address = nullptr;
    CUdriverProcAddressQueryResult status;
    CHECK_CU(0, cu.GetProcAddress(c.name, &address, c.version, c.flags, &status));
    EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SUCCESS);
    EXPECT_EQ(address, dlsym(cu.library, c.symbol));
  }
  void* address = nullptr;
  CUdriverProcAddressQueryResult status;
  cu.GetProcAddress("cuNoSuchFunction", &address, 12000, 1, &status);
  EXPECT_EQ(address, nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  cu.GetProcAddress("cuMemAllocAsync", &address, 11010, 1, &status);
  EXPECT_EQ(address, nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
}

// ---------------------------------------------------------------------------------------------- settings

class Settings : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && !Driver::Emulated()) GTEST_SKIP() << "settings of the emulated driver";
  }
};

TEST_F(Settings, OlderDriverLacksNewerFunctions) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    int version = 0;
    CHECK_CU(0, cu.DriverGetVersion(&version));
    EXPECT_EQ(version, 12040);
    EXPECT_EQ(cu.CtxRecordEvent, nullptr);
    EXPECT_NE(cu.StreamGetId, nullptr);
    const auto direct = reinterpret_cast<PFN_cuCtxRecordEvent_v12050>(dlsym(cu.library, "cuCtxRecordEvent"));
    CHECK_CU(CUDA_ERROR_NOT_FOUND, direct(gpu.context, nullptr));
    return 0;
  };
  const ChildResult child = RunChild("old", body, {{"EMU_DRIVER_VERSION", "12040"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Settings, PlannedFailuresHappenOnce) {
  const auto body = [] {
    Gpu gpu;
    const Driver& cu = driver();
    CUdeviceptr p = 0;
    CUevent event = nullptr;
    CHECK_CU(0, cu.MemAlloc(&p, 100));
    CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, cu.MemAlloc(&p, 100));
    CHECK_CU(0, cu.MemAlloc(&p, 100));
    CHECK_CU(CUDA_ERROR_NOT_PERMITTED, cu.EventCreate(&event, 0));
    CHECK_CU(0, cu.EventCreate(&event, 0));
    return 0;
  };
  const ChildResult child = RunChild("fail", body, {{"EMU_FAIL", "cuMemAlloc:2,cuEventCreate:1:800"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

TEST_F(Settings, CallsAreCounted) {
  const std::string path = testing::TempDir() + "emulator_calls." + std::to_string(getpid());
  const auto body = [] {
    Gpu gpu;
    CUdeviceptr p = 0;
    for (int i = 0; i < 3; ++i) CHECK_CU(0, driver().MemAlloc(&p, 100));
    return 0;
  };
  const ChildResult child = RunChild("count", body, {{"EMU_COUNT", path}});
  EXPECT_EQ(child.status, 0) << child.output;
  std::ostringstream counts;
  counts << std::ifstream(path).rdbuf();
  EXPECT_NE(counts.str().find("\ncuMemAlloc_v2 3\n"), std::string::npos) << counts.str();
  EXPECT_EQ(counts.str().find("cuMemFree_v2"), std::string::npos);
  unlink(path.c_str());
}

TEST_F(Settings, DevicesHaveMemoryOfTheirOwn) {
  const auto body = [] {
    const Driver& cu = driver();
    Gpu first(0);
    CUdeviceptr p = 0;
    CHECK_CU(0, cu.MemAlloc(&p, 48 << 20));
    Gpu second(1);
    CHECK_CU(0, cu.CtxPushCurrent(second.context));
    CUdeviceptr q = 0;
    CHECK_CU(0, cu.MemAlloc(&q, 48 << 20));
    CHECK_CU(0, cu.CtxEnablePeerAccess(first.context, 0));
    CHECK_CU(0, LaunchFill(nullptr, p, 64, 1));
    CHECK_CU(0, cu.CtxSynchronize());
    CHECK_CU(0, cu.MemFree(p));
    CHECK_CU(0, cu.CtxSetCurrent(first.context));
    CHECK_CU(0, LaunchFill(nullptr, q, 64, 1));  // access goes one way
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, cu.CtxSynchronize());
    return 0;
  };
  const ChildResult child = RunChild("two", body, {{"EMU_DEVICES", "2"}, {"EMU_MEMORY", "64M"}});
  EXPECT_EQ(child.status, 0) << child.output;
}

}  // namespace
