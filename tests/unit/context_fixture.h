// Core over a driver, without the shim: a Context made by hand, and gates that hold streams.
//
// The tests run on the emulated driver (LD_LIBRARY_PATH says so). A gate is a kernel that spins until its word is set:
// what must not wait is tried while it is closed, and what must wait has not returned before it opens.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "core/context.h"
#include "tests/harness/gpu.h"
#include "tests/harness/launch.h"
#include "tests/unit/eternal.h"

namespace cushion {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kSegment = 2 * kMiB;  // one block of this size is a whole segment in these tests

class Gate {
 public:
  ~Gate() { Open(); }
  void Hold(CUstream stream) { CHECK_CU(0, harness::LaunchWaitFlag(stream, flag_.on_device())); }
  void Open() { flag_.Set(1); }

 private:
  harness::SharedWord flag_;
};

struct TestStream {
  TestStream() {
    unsigned long long id = 0;
    CHECK_CU(0, harness::driver().StreamGetId(stream, &id));
    identity = {stream, id, 0};
  }
  operator CUstream() const { return stream; }
  void Finish() { CHECK_CU(0, stream.Synchronize()); }
  bool Busy() { return harness::driver().StreamQuery(stream) == CUDA_ERROR_NOT_READY; }

  harness::Stream stream;
  StreamIdentity identity;
};

class Core {
 public:
  Core() : options_(eternal<Options>(read_options(nullptr).options)) {
    EXPECT_TRUE(shared.driver.bind([](const char* name) { return dlsym(harness::driver().library, name); }));
    options_.segment_size.bytes = kSegment;
    options_.growth_max.bytes = kSegment;  // a request gets its exact need
    options_.magazine_size.bytes = 0;      // what these tests ask of the pool is not to depend on what came before
    options_.oom_wait.ns = 50 * harness::kMillisecond;
    const ClockPair now = ClockPair::now();
    while (monotonic_ns() < now.ns + harness::kMillisecond) {
    }
    // Generous: an idle driver that is slow today has not waited.
    shared.noticeable_wait = TickLength(now, ClockPair::now()).ticks_in(15e-3);
    shared.options = &options_;
  }

  // To be set before the first use of context().
  Options& options() { return options_; }
  Context& context() {
    if (context_ == nullptr) {
      shared.noticeable_wait = 1'000'000;  // ticks: about half a millisecond, beside holds of tens of them
      context_ = &Add(0);
    }
    return *context_;
  }
  // The Context of the current CUDA context.
  Context& Add(CUdevice device) {
    CUcontext handle = nullptr;
    std::size_t total = 0;
    CHECK_CU(0, harness::driver().CtxGetCurrent(&handle));
    CHECK_CU(0, harness::driver().DeviceTotalMem(&total, device));
    Context& made = eternal<Context>(shared, handle, device, total, true);
    const int n = shared.context_count.load();
    shared.contexts[static_cast<std::size_t>(n)] = &made;
    shared.context_count = n + 1;
    return made;
  }

  // 0 where core does not serve.
  CUdeviceptr Malloc(std::uint64_t bytes) { return Allocate({bytes, Api::malloc, nullptr}); }
  CUdeviceptr MallocAsync(std::uint64_t bytes, const TestStream& lane) {
    return Allocate({bytes, Api::malloc_async, &lane.identity});
  }
  CUresult Free(CUdeviceptr p) { return FreeBlock(BlockAt(p), p); }
  Context::Found Find(Block* block, CUdeviceptr p) {
    const Segment* segment = shared.map.find(p);
    static Arena& nowhere = eternal<Arena>(shared.map, context(), 0);
    Arena* arena = segment != nullptr ? segment->arena() : &nowhere;
    return {block, p, arena, arena->generation()};
  }
  // Of a pointer that need not be a block's any more.
  CUresult FreeBlock(Block* block, CUdeviceptr p) { return context().free(Find(block, p)); }
  CUresult FreeAsync(CUdeviceptr p, const TestStream& lane) { return FreeBlockAsync(BlockAt(p), p, lane, context()); }
  CUresult FreeBlockAsync(Block* block, CUdeviceptr p, const TestStream& stream, Context& stream_context) {
    return context().free_async(Find(block, p), stream.identity, stream_context);
  }
  Block* BlockAt(CUdeviceptr p) {
    Segment* segment = shared.map.find(p);
    Block* block = segment == nullptr ? nullptr : segment->block_at(p);
    EXPECT_NE(block, nullptr) << "no live block begins at " << p;
    static Block none;
    return block != nullptr ? block : &none;
  }

  std::uint64_t held() { return context().usage().held.current(); }
  bool valid() {
    bool good = true;
    return context().inspect(Patience::some, [&](const Pool& pool) { good = good && pool.valid(); }) && good;
  }
  Usage usage() { return context().usage(); }
  std::uint64_t served(Api api) {
    std::uint64_t calls = 0;
    context().for_each_tally([&](const Tally& t) { calls += t.served[static_cast<int>(api)]; });
    return calls;
  }
  std::uint64_t frees() {
    std::uint64_t calls = 0;
    context().for_each_tally([&](const Tally& t) { calls += t.frees; });
    return calls;
  }

  Shared& shared = eternal<Shared>();

  // From now on the driver has no memory for a segment.
  void refuse_growth() {
    shared.driver.cuMemAlloc_v2 = [](CUdeviceptr*, std::size_t) { return CUDA_ERROR_OUT_OF_MEMORY; };
  }

 private:
  CUdeviceptr Allocate(const Request& request) {
    CUdeviceptr p = 0;
    return context().allocate(request, &p) ? p : 0;
  }

  Options& options_;
  Context* context_ = nullptr;
};

// Takes all of the device's memory but `leave` bytes.
class Hog {
 public:
  explicit Hog(std::uint64_t leave) : block_(Free() - leave) {}
  static std::uint64_t Free() {
    std::size_t idle = 0;
    std::size_t total = 0;
    CHECK_CU(0, harness::driver().MemGetInfo(&idle, &total));
    return idle;
  }

 private:
  harness::DeviceBlock block_;
};

class ContextTest : public harness::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    REQUIRE_CU(0, harness::LoadKernels());
    core_ = std::make_unique<Core>();
  }
  void TearDown() override {
    if (core_ != nullptr) {
      EXPECT_TRUE(core_->valid());
    }
    core_.reset();
    GpuTest::TearDown();
  }
  Core& core() { return *core_; }
  const Counters& counters() { return core_->shared.counters; }
  void Synchronize() { CHECK_CU(0, harness::driver().CtxSynchronize()); }

 private:
  std::unique_ptr<Core> core_;
};

}  // namespace cushion
