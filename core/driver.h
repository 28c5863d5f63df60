// Driver: the table of driver functions that core is handed (by the shim: the real driver's; by a test: the
// emulated one's), and the rules for calling through it.
//
// Every call that Cushion makes on its own account goes through Driver::call, which counts it and the time it
// took (about 15 ns a call) and marks the thread as "inside", so that a hook reached from within the driver
// forwards instead of serving (thread-local recursion guard).
#pragma once

#include <cudaTypedefs.h>

#include <atomic>
#include <cstdint>

#include "core/ticks.h"

namespace cushion {

// How deep this thread is inside real driver calls. Constant-initialised and trivially destructible: hooks run in
// static constructors and destructors too.
extern constinit thread_local int t_inside;

class InsideDriver {
 public:
  InsideDriver() noexcept { ++t_inside; }
  ~InsideDriver() { --t_inside; }
  InsideDriver(const InsideDriver&) = delete;
  InsideDriver& operator=(const InsideDriver&) = delete;
};

// The functions alone: what is filled at once and then only read.
struct DriverTable {
#define CUSHION_DRIVER(elf, base, since) PFN_##base##_v##since elf = nullptr;
#include "core/driver.def"
#undef CUSHION_DRIVER
  int version = 0;  // cuDriverGetVersion's answer, e.g. 13000

  // Fills the table from `find` (a name to an address, or null) and the version; false without a usable driver.
  bool bind(void* (*find)(const char* name)) noexcept;
};

struct Driver : DriverTable {
  // Cushion's own calls and the ticks spent in them. Relaxed: they are only summed for the report.
  mutable std::atomic<std::uint64_t> calls{0};
  mutable std::atomic<std::uint64_t> time{0};

  template <class Fn, class... Args>
  CUresult call(Fn fn, Args... args) const noexcept {
    if (fn == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    InsideDriver inside;
    const std::uint64_t start = ticks();
    const CUresult result = fn(args...);
    calls.fetch_add(1, std::memory_order_relaxed);
    time.fetch_add(ticks() - start, std::memory_order_relaxed);
    return result;
  }
};

// Errors after which every call in the context fails until it is reset.
inline bool is_sticky(CUresult r) noexcept {
  switch (r) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
      return true;
    default:
      return false;
  }
}

// Runs Cushion's own calls of a scope with the thread's capture mode relaxed: event queries, event waits, cuMemAlloc
// and cuMemFree are then harmless to any open capture (contract §4, measured). Afterwards the thread has the program's
// mode again: what the driver refused to change is not changed back, and a way back that it refuses is asked for once
// more. Costs about 15 ns.
class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(const Driver& driver) noexcept : driver_(driver), exchanged_(exchange()) {}
  ~RelaxedCaptureMode() {
    if (exchanged_ && !exchange()) exchange();
  }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  bool exchange() noexcept {
    if (driver_.cuThreadExchangeStreamCaptureMode == nullptr) return false;
    InsideDriver inside;
    return driver_.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  const bool exchanged_;
};

// Makes a context current for a scope: result() says whether it is; what must not happen in another context, as making
// memory, streams and events, asks first. The program's context comes back: a pop that the driver refuses is asked for
// once more. Costs about 35 ns, nothing if it is current already.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context) noexcept : driver_(driver) {
    CUcontext now = nullptr;
    InsideDriver inside;
    if (driver.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == context) return;
    result_ = driver.cuCtxPushCurrent_v2(context);
    pushed_ = result_ == CUDA_SUCCESS;
  }
  ~CurrentContext() {
    if (pushed_ && !pop()) pop();
  }
  CUresult result() const noexcept { return result_; }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pop() noexcept {
    InsideDriver inside;
    CUcontext ignored = nullptr;
    return driver_.cuCtxPopCurrent_v2(&ignored) == CUDA_SUCCESS;
  }
  const Driver& driver_;
  CUresult result_ = CUDA_SUCCESS;
  bool pushed_ = false;
};

}  // namespace cushion
