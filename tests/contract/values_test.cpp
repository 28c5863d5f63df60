// Contract §2, values: what each call answers, and what the memory it hands out is like.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <latch>
#include <string_view>
#include <thread>

#include "tests/contract/contract.h"

namespace {

using namespace contract;

class Values : public Contract {};

bool none_is(const std::vector<std::uint8_t>& bytes, std::uint8_t value) {
  return std::memchr(bytes.data(), value, bytes.size()) == nullptr;
}

TEST_F(Values, AllocatingNothingIsInvalid) {
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemAlloc(&p, 0));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemAlloc(nullptr, 16));
}

TEST_F(Values, AllocatingMoreThanTheDeviceHasIsOutOfMemory) {
  const Stream stream;
  CUdeviceptr p = 0;
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAlloc(&p, std::size_t{1} << 50));
  CHECK_CU(CUDA_ERROR_OUT_OF_MEMORY, driver().MemAllocAsync(&p, std::size_t{1} << 50, stream));
  p = allocate(KiB);  // the failure is not remembered
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Values, FreeingNullSucceeds) { CHECK_CU(CUDA_SUCCESS, driver().MemFree(0)); }

TEST_F(Values, FreeingAnInteriorPointerIsInvalid) {
  for (const std::size_t size : {4 * KiB, 3 * MiB}) {
    const CUdeviceptr p = allocate(size);
    CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p + 512));
    CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p + 1));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  }
}

TEST_F(Values, FreeingAHostPointerIsInvalid) {
  int on_the_stack = 0;
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(reinterpret_cast<CUdeviceptr>(&on_the_stack)));
}

// One of the blocks lies at the head of the memory that the pool got from the driver: were its second free
// to reach the driver, all the others would go with it.
TEST_F(Values, FreeingTwiceIsInvalidAndTouchesNobodyElse) {
  for (const std::size_t size : {4 * KiB, 1 * MiB, 3 * MiB}) {
    std::vector<CUdeviceptr> blocks(32);
    for (CUdeviceptr& p : blocks) {
      p = allocate(size);
      write_ends(p, size);
    }
    CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(blocks.back(), 31, size));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      CHECK_CU(CUDA_SUCCESS, driver().MemFree(blocks[i]));
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(blocks[i]));
      if (i + 1 == blocks.size()) break;
      EXPECT_TRUE(all_are(harness::Bytes(blocks.back(), size), 31));
    }
  }
}

TEST_F(Values, Alignment) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{511}, 4 * KiB, 100 * KiB + 1, 1 * MiB}) {
    const CUdeviceptr first = allocate(size), second = allocate(size);
    EXPECT_EQ(first % 512, 0U) << size;
    EXPECT_EQ(second % 512, 0U) << size;
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(first));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(second));
  }
  const std::size_t large_alignment = under_cushion() ? 64 * KiB : 2 * MiB;
  for (const std::size_t size : {1 * MiB + 1, 3 * MiB + 5, 33 * MiB + 7}) {
    const CUdeviceptr first = allocate(size), second = allocate(size);
    EXPECT_EQ(first % large_alignment, 0U) << size;
    EXPECT_EQ(second % large_alignment, 0U) << size;
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(first));
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(second));
  }
}

TEST_F(Values, AlignmentAsync) {
  const Stream stream;
  for (const std::size_t size : {std::size_t{1}, 100 * KiB + 1, 3 * MiB + 5}) {
    const CUdeviceptr first = allocate_async(size, stream), second = allocate_async(size, stream);
    EXPECT_EQ(first % 512, 0U) << size;
    EXPECT_EQ(second % 512, 0U) << size;
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(first, stream));
    CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(second, stream));
  }
}

TEST_F(Values, BlocksDoNotOverlap) {
  const Stream stream;
  std::vector<std::pair<CUdeviceptr, std::size_t>> blocks;
  for (int round = 0; round < 40; ++round) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{513}, 5 * KiB, 70 * KiB + 3, 1 * MiB + 1}) {
      blocks.emplace_back(round % 2 == 0 ? allocate(size) : allocate_async(size, stream), size);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    EXPECT_LE(blocks[i - 1].first + blocks[i - 1].second, blocks[i].first);
  }
  for (const auto& [p, size] : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

// Natively a request of 1 MiB and a byte takes 2 MiB; Cushion's pool packs such blocks closer. In a process of its own,
// where no cached blocks of that size lie about.
SCENARIO(footprint) {
  std::vector<CUdeviceptr> blocks(16);
  for (CUdeviceptr& p : blocks) p = allocate(MiB + 1);
  std::sort(blocks.begin(), blocks.end());
  std::size_t closest = SIZE_MAX;
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    closest = std::min<std::size_t>(closest, blocks[i] - blocks[i - 1]);
  }
  if (pooled()) {
    EXPECT_LT(closest, 2 * MiB);
  } else {
    EXPECT_GE(closest, 2 * MiB);
  }
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Values, Footprint) {
  if (under_cushion() && !packs()) GTEST_SKIP() << "the driver's pool and bins round as they like";
  EXPECT_SCENARIO("footprint");
}

TEST_F(Values, PitchedRowsStartAligned) {
  CUdeviceptr p = 0;
  std::size_t pitch = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocPitch(&p, &pitch, 1000, 7, 4));
  EXPECT_EQ(pitch, 1024U);
  EXPECT_EQ(p % 512, 0U);
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(p, 1, pitch * 7));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
}

TEST_F(Values, MemGetInfoFollowsUse) {
  const std::size_t size = 512 * MiB;
  const std::size_t before = free_memory();
  const CUdeviceptr p = allocate(size);
  EXPECT_LE(free_memory(), before - size);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());  // deferred: the block is clean now
  EXPECT_GE(free_memory() + 64 * MiB, before);
}

SCENARIO(what_was_freed_is_free) {
  const std::size_t before = free_memory();
  for (const std::size_t size : {512 * MiB, 512 * KiB}) {
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(size)));
    if (deferred()) {
      CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
    }
    EXPECT_GE(free_memory() + 64 * MiB, before) << size;
  }
}

// Whether Cushion keeps what was freed or gives it back on some occasion.
TEST_F(Values, WhatWasFreedIsFree) {
  EXPECT_SCENARIO("what_was_freed_is_free");
  EXPECT_SCENARIO("what_was_freed_is_free", {"CUSHION_RELEASE_THRESHOLD=0"});
}

// Programs read how much is free and take most of it, also just after they freed much.
TEST_F(Values, MostOfWhatMemGetInfoSaysCanBeAllocated) {
  std::vector<CUdeviceptr> blocks(8);
  for (CUdeviceptr& p : blocks) p = allocate(200 * MiB);
  for (const CUdeviceptr p : blocks) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSynchronize());
  const std::size_t most = free_memory() / 10 * 9;
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(most)));
}

TEST_F(Values, PointersOfOthersAreFreedByTheirOwners) {
  const Stream stream;
  CUdeviceptr managed = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocManaged(&managed, MiB, CU_MEM_ATTACH_GLOBAL));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(managed));

  void* host = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().MemHostAlloc(&host, MiB, 0));
  CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(reinterpret_cast<CUdeviceptr>(host)));
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeHost(host));

  CUmemoryPool pool = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().DeviceGetDefaultMemPool(&pool, 0));
  CUdeviceptr from_pool = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocFromPoolAsync(&from_pool, MiB, pool, stream));
  fill(stream, from_pool, MiB, 1);
  CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(from_pool, stream));
  CHECK_CU(CUDA_SUCCESS, driver().MemAllocFromPoolAsync(&from_pool, MiB, pool, stream));
  finish(stream);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(from_pool));
}

// The two ways to ask for a block's range agree. Natively it is the block's own; under Cushion its segment's, but of
// mapped memory the block's.
TEST_F(Values, AddressRange) {
  const CUdeviceptr other = allocate(1000);
  const CUdeviceptr p = allocate(1000);
  CUdeviceptr base = 0, start = 0;
  std::size_t size = 0, range = 0;
  CHECK_CU(CUDA_SUCCESS, driver().MemGetAddressRange(&base, &size, p));
  CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p));
  CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p));
  EXPECT_EQ(base, p);
  EXPECT_EQ(start, p);
  EXPECT_EQ(size, 1000U);
  EXPECT_EQ(range, 1000U);
  CHECK_CU(CUDA_SUCCESS, driver().MemGetAddressRange(&base, nullptr, p + 999));
  EXPECT_EQ(base, p);
  CUcontext context = nullptr, current = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().PointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, p));
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&current));
  EXPECT_EQ(context, current);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(other));
}

TEST_F(Values, NewMemoryIsZeroNatively) {
  if (under_cushion()) GTEST_SKIP() << "under Cushion it holds whatever was there, or what CUSHION_INIT says";
  for (const std::size_t size : {4 * KiB, 3 * MiB}) {
    const CUdeviceptr p = allocate(size);
    std::vector<std::uint8_t> bytes(size, 0xff);
    CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoH(bytes.data(), p, size));
    EXPECT_TRUE(all_are(bytes, 0)) << size;
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
  }
}

// Writes 0xAB into each block and frees it, so that the next one is likely the same memory; returns every
// block's content as it was handed out.
std::vector<std::vector<std::uint8_t>> contents_of_reused_memory() {
  std::vector<std::vector<std::uint8_t>> contents;
  const Stream stream;
  for (const std::size_t size : {std::size_t{1000}, 64 * KiB, 3 * MiB + 1}) {
    for (int round = 0; round < 6; ++round) {
      const bool async = round % 2 != 0;
      if (async && !pooled()) continue;  // what cuMemAllocAsync hands out is then the driver's matter
      const CUdeviceptr p = async ? allocate_async(size, stream) : allocate(size);
      std::vector<std::uint8_t>& bytes = contents.emplace_back(size);
      // On the stream itself: natively and under Cushion, what initialises memory is ordered before its use.
      CHECK_CU(CUDA_SUCCESS, driver().MemcpyDtoHAsync(bytes.data(), p, size, stream));
      finish(stream);
      CHECK_CU(CUDA_SUCCESS, driver().MemsetD8Async(p, 0xab, size, stream));
      if (async) {
        CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
      } else {
        CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
      }
      finish(stream);
    }
  }
  return contents;
}

SCENARIO(init_zero) {
  for (const auto& bytes : contents_of_reused_memory()) EXPECT_TRUE(all_are(bytes, 0)) << bytes.size();
}

// A program that reads what it never wrote must notice: neither zeros, nor what it once wrote there itself.
SCENARIO(init_junk) {
  for (const auto& bytes : contents_of_reused_memory()) {
    EXPECT_TRUE(none_is(bytes, 0)) << bytes.size();
    EXPECT_TRUE(none_is(bytes, 0xab)) << bytes.size();
  }
}

TEST_F(Values, InitZero) {
  if (!under_cushion()) GTEST_SKIP() << "an option of Cushion";
  EXPECT_SCENARIO("init_zero", {"CUSHION_INIT=zero"});
}

TEST_F(Values, InitJunk) {
  if (!under_cushion()) GTEST_SKIP() << "an option of Cushion";
  EXPECT_SCENARIO("init_junk", {"CUSHION_INIT=junk"});
}

CUcontext new_context() {
  CUcontext context = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxCreate(&context, 0, 0));
  return context;
}

TEST_F(Values, FreeingUnderAnotherContextOrNone) {
  CUcontext primary = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&primary));
  const CUdeviceptr first = allocate(MiB), second = allocate(MiB);
  const CUcontext other = new_context();
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(first));
  const CUdeviceptr third = allocate(MiB);
  for (int pushed = 0; pushed < 2; ++pushed) CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(nullptr));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(second));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(third));
  CUcontext current = other;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&current));
  EXPECT_EQ(current, nullptr) << "a free leaves the current context as it was";
  CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(other));
  CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
}

TEST_F(Values, AllocatingWithoutAContextFails) {
  std::thread([] {
    CUdeviceptr p = 0;
    CHECK_CU(CUDA_ERROR_INVALID_CONTEXT, driver().MemAlloc(&p, KiB));
  }).join();
}

// A destroyed context takes its memory along; other contexts keep theirs, and new ones work.
TEST_F(Values, ContextDestroyFreesItsMemory) {
  CUcontext primary = nullptr;
  CHECK_CU(CUDA_SUCCESS, driver().CtxGetCurrent(&primary));
  const CUdeviceptr kept = allocate(MiB);
  CHECK_CU(CUDA_SUCCESS, driver().MemsetD8(kept, 7, MiB));
  const std::size_t before = free_memory();
  for (int round = 0; round < 4; ++round) {
    const CUcontext context = new_context();
    const CUdeviceptr lost = allocate(300 * MiB);
    write_ends(lost, 300 * MiB);
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(allocate(MiB)));  // something cached goes, too
    CHECK_CU(CUDA_SUCCESS, driver().CtxDestroy(context));
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
  }
  EXPECT_GE(free_memory() + 200 * MiB, before);
  EXPECT_TRUE(all_are(harness::Bytes(kept, MiB), 7));
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(kept));
}

// Allocates, frees and leaves blocks behind, in this thread and one that lives through the reset; after
// `reset` both must get memory that works.
void lives_through(const std::function<void()>& reset) {
  std::latch used{1}, was_reset{1};
  const auto use = [] {
    const Stream stream;
    for (const std::size_t size : {4 * KiB, 3 * MiB}) {
      const CUdeviceptr freed = allocate(size), freed_async = allocate_async(size, stream), kept = allocate(size);
      for (const CUdeviceptr p : {freed, freed_async, kept}) fill(stream, p, size, 3);
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(freed_async, stream));
      finish(stream);
      CHECK_CU(CUDA_SUCCESS, driver().MemFree(freed));
    }
  };
  const auto make_current = [] {
    CUcontext primary = nullptr;
    CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&primary, 0));
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
  };
  std::thread other([&] {
    make_current();
    use();
    used.count_down();
    was_reset.wait();
    make_current();
    CHECK_CU(CUDA_SUCCESS, harness::LoadKernels());
    use();
  });
  use();
  used.wait();
  reset();
  was_reset.count_down();
  other.join();
  make_current();
  use();
}

SCENARIO(primary_context_reset) {
  lives_through([] { CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxReset(0)); });
}

SCENARIO(primary_context_last_release) {
  lives_through([] {
    unsigned flags = 0;
    int active = 1;
    while (active != 0) {
      CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRelease(0));
      CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxGetState(0, &flags, &active));
    }
  });
}

// Small and large blocks, left behind and cached: all of it is free memory of the next context.
SCENARIO(primary_context_reset_frees_its_memory) {
  const std::size_t before = free_memory();
  for (int round = 0; round < 4; ++round) {
    for (const std::size_t size : {MiB, 300 * MiB}) {
      std::vector<CUdeviceptr> freed;
      for (std::size_t bytes = 0; bytes < 300 * MiB; bytes += size) {
        allocate(size);
        freed.push_back(allocate(size));
      }
      for (const CUdeviceptr p : freed) CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
    }
    CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxReset(0));
    CUcontext primary = nullptr;
    CHECK_CU(CUDA_SUCCESS, driver().DevicePrimaryCtxRetain(&primary, 0));
    CHECK_CU(CUDA_SUCCESS, driver().CtxSetCurrent(primary));
    EXPECT_GE(free_memory() + 200 * MiB, before) << "round " << round;
  }
}

TEST_F(Values, PrimaryContextResetFreesItsMemory) {
  if (under_cushion() && !pooled() && !Driver::Emulated())
    GTEST_SKIP() << "what is live in the driver's pool outlives the reset (measured on an H200)";
  EXPECT_SCENARIO("primary_context_reset_frees_its_memory");
}
TEST_F(Values, PrimaryContextReset) { EXPECT_SCENARIO("primary_context_reset"); }
TEST_F(Values, PrimaryContextLastRelease) { EXPECT_SCENARIO("primary_context_last_release"); }

TEST_F(Values, AllocatingInAHostFunctionIsRefusedAndNeverDeadlocks) {
  struct Seen {
    CUdeviceptr block, allocated = 0;
    CUresult allocate = CUDA_ERROR_UNKNOWN, free = CUDA_ERROR_UNKNOWN;
  } seen;
  seen.block = allocate(64 * KiB);
  const Stream stream;
  CHECK_CU(CUDA_SUCCESS, driver().LaunchHostFunc(
                             stream,
                             [](void* data) {
                               Seen& s = *static_cast<Seen*>(data);
                               s.allocate = driver().MemAlloc(&s.allocated, 64 * KiB);
                               s.free = driver().MemFree(s.block);
                             },
                             &seen));
  finish(stream);
  if (!under_cushion() || seen.allocate != CUDA_SUCCESS) {
    EXPECT_EQ(seen.allocate, CUDA_ERROR_NOT_PERMITTED);
  } else {
    CHECK_CU(CUDA_SUCCESS, driver().MemFree(seen.allocated));
  }
  if (deferred() && seen.free == CUDA_SUCCESS) return;  // nothing was waited for, so nothing was refused
  EXPECT_EQ(seen.free, CUDA_ERROR_NOT_PERMITTED);
  CHECK_CU(CUDA_SUCCESS, driver().MemFree(seen.block));  // a refused free leaves the block live
}

// A wild write breaks the context: from then on every call answers 700. Cushion knows from the first driver
// call of its own that says so, here the wait in cuMemFree.
SCENARIO(sticky_error) {
  const CUdeviceptr first = allocate(MiB), second = allocate(MiB);
  const Stream stream;
  fill(stream, 0x10, 4 * KiB, 1);  // no such memory
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().StreamSynchronize(stream));
  if (deferred()) {
    CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().CtxSynchronize());
  }
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemFree(first));
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemFree(second));
  CUdeviceptr p = 0;
  std::size_t free = 0, total = 0;
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemAlloc(&p, MiB));
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemAllocAsync(&p, MiB, stream));
  CHECK_CU(CUDA_ERROR_ILLEGAL_ADDRESS, driver().MemGetInfo(&free, &total));
  std::_Exit(expectations_failed() ? 1 : 0);  // no orderly end is left
}

TEST_F(Values, AfterAStickyErrorEveryCallSaysSo) { EXPECT_SCENARIO("sticky_error"); }

// Registered before the driver's own handlers, hence run after them: the driver is gone, or going.
CUdeviceptr late_block = 0;
SCENARIO_WITHOUT_CONTEXT(free_late_in_life) {
  std::atexit([] {
    const CUresult result = driver().MemFree(late_block);
    std::cout << (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED ? "as allowed" : "wrong") << std::flush;
  });
  use_primary_context();
  late_block = allocate(MiB);
}

TEST_F(Values, FreeingLateInLife) {
  const Outcome outcome = run_scenario("free_late_in_life");
  EXPECT_TRUE(outcome.exited(0)) << outcome;
  EXPECT_EQ(outcome.out, "as allowed");
}

// What calls answer at their edges, where the contract says no more than "as the driver": the same process
// with Cushion made inert by CUSHION_DISABLE must print the same. Each call is printed before it is made, so that one
// that never returns is the last one seen.
SCENARIO(edges) {
#define SAY(call) (std::cout << #call << std::flush, std::cout << ": " << (call) << std::endl)
  const Stream stream;
  CUdeviceptr p = 0;
  std::size_t size = 0, pitch = 0;
  SAY(driver().MemGetInfo(nullptr, nullptr));
  SAY(driver().MemGetInfo(&size, nullptr));
  SAY(driver().MemGetInfo(nullptr, &size));
  SAY(driver().MemAlloc(&p, SIZE_MAX));
  SAY(driver().MemAllocAsync(&p, SIZE_MAX, stream));
  SAY(driver().MemAllocAsync(&p, 0, stream));
  SAY(driver().MemAllocAsync(nullptr, KiB, stream));
  SAY(driver().MemAllocPitch(&p, &pitch, 100, 3, 5));
  SAY(driver().MemAllocPitch(&p, &pitch, 0, 3, 4));
  SAY(driver().MemAllocPitch(&p, &pitch, 100, 0, 4));
  SAY(driver().MemAllocPitch(nullptr, &pitch, 100, 3, 4));
  SAY(driver().MemFreeAsync(0, stream));
  int on_the_stack = 0;
  SAY(driver().MemFreeAsync(reinterpret_cast<CUdeviceptr>(&on_the_stack), stream));
  for (const std::size_t n : {64 * KiB, 3 * MiB}) {
    p = allocate_async(n, stream);
    SAY(driver().MemFreeAsync(p, stream));
    p = allocate_async(n, stream);
    finish(stream);
    SAY(driver().MemFree(p));
    p = allocate(n);
    SAY(driver().MemFreeAsync(p, stream));
    finish(stream);
    p = allocate(n);
    SAY(driver().MemFree(p + 512));
    SAY(driver().MemFree(p));
    SAY(driver().MemFree(p));
  }
#undef SAY
}

TEST_F(Values, EdgesAnswerAsTheDriver) {
  if (!under_cushion()) GTEST_SKIP() << "compares Cushion with the driver below it";
  const Outcome native = run_scenario("edges", {"CUSHION_DISABLE=1"}, 15s);
  const Outcome served = run_scenario("edges", {}, 15s);
  EXPECT_TRUE(native.exited(0)) << native;
  EXPECT_TRUE(served.exited(0)) << served;
  EXPECT_EQ(served.out, native.out);
}

// Nothing defines these, and a process that makes them all natively never ends. Cushion answers 1.
TEST_F(Values, WrongStreamOrderedFreesAreInvalid) {
  if (!under_cushion()) GTEST_SKIP() << "the driver promises nothing for stream-ordered frees that are wrong";
  const Stream stream;
  for (const std::size_t size : {64 * KiB, 3 * MiB}) {
    for (const bool async : {false, true}) {
      CUdeviceptr p = async ? allocate_async(size, stream) : allocate(size);
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(p + 512, stream));
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p + 512));
      CHECK_CU(CUDA_SUCCESS, driver().MemFreeAsync(p, stream));
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(p, stream));
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p));
      finish(stream);
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFree(p));
      p = async ? allocate_async(size, stream) : allocate(size);
      finish(stream);
      CHECK_CU(CUDA_SUCCESS, driver().MemFree(p));
      CHECK_CU(CUDA_ERROR_INVALID_VALUE, driver().MemFreeAsync(p, stream));
    }
  }
}

}  // namespace
