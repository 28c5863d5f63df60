// Async allocator (CUSHION_ALLOCATOR=async): cudaMalloc served from the driver's own stream-ordered pool, the default
// one of the device, whose release threshold is raised so that freed memory stays there. cudaMallocAsync goes to the
// driver as natively: to the same pool, unless the program has chosen another. One object a context.
//
// Invariants, each of which a test breaks:
//  - a block may be used by every stream when it is handed out: it is allocated on a stream of our own, on which
//  nothing
//    else is waited for, and that stream is found complete before the answer;
//  - cudaMalloc never waits for work of the program's. A free that has yet to wait for the device goes on a second
//    stream, and where the driver, its memory short, makes the allocation wait for another stream's free, the host
//    waits at most OOM_WAIT (that work may itself wait for the host): then the call is the driver's;
//  - cudaFree waits for the block's whole context as natively. `deferred`: the second stream waits instead, on a fence
//    recorded inside the free (fence.h); where there can be no fence (an older driver, an open capture) it is a sync
//    free. Either way the driver gets the block back by cuMemFreeAsync;
//  - the threshold is raised only from the driver's default, 0: a value that the program has set stays;
//  - not served, the call is then the driver's: while a capture may be open, in a context that is broken or about to
//    end, once peer access was enabled (memory from a pool is out of peers' reach), and on a device whose pools the
//    program manages (Runtime). What was served before peer access stays reachable: admit();
//  - a reset takes the context's streams and blocks along. Whoever comes back from a driver call looks at the
//  generation
//    first.
//
// The blocks are recorded by Runtime. Costs of a pair: two calls to allocate (cuMemAllocFromPoolAsync, cuStreamQuery),
// the wait and one call to free.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/fence.h"
#include "core/shared.h"

namespace cushion {

class Context;

class AsyncAllocator {
 public:
  AsyncAllocator(Shared& shared, Context& context) noexcept : shared_(shared), context_(context) {}

  // False: not served; the call is the driver's. The caller looks at the context's generation once more when it records
  // the block.
  bool allocate(std::uint64_t bytes, CUdeviceptr* out) noexcept;
  // cudaFree of a block that was handed out, by one thread alone. On an error the block stays live.
  CUresult free(CUdeviceptr address) noexcept;

  // The device's default pool, its threshold raised; null if there is none.
  CUmemoryPool prepare() noexcept;
  // Makes the pool's memory accessible from `device`.
  void admit(CUdevice device) noexcept;

  // Memory is short elsewhere: the pool gives back what it does not use, if need be after a wait of at most
  // `patience_ns` for what is freed and still in use by the context. Whether anything went back.
  bool trim(std::uint64_t patience_ns) noexcept;
  // What the pool holds and nobody uses, in bytes.
  std::uint64_t unused() const noexcept;

  // The context was reset or destroyed.
  void discard() noexcept;

 private:
  const Driver& driver() const noexcept { return shared_.driver; }
  bool note(CUresult result) noexcept;  // tells the context of a sticky error; true for success
  // The stream in `slot`, made if there is none yet; null if the driver refuses.
  CUstream open(std::atomic<CUstream>& slot, std::uint64_t generation) noexcept;
  // Fills the block as INIT says and waits for the stream that it was allocated on. False: not in time, or an error.
  bool make_ready(CUdeviceptr address, std::uint64_t bytes, CUstream stream) noexcept;
  bool completes(CUstream stream) noexcept;
  bool trim_once() noexcept;
  std::uint64_t figure(CUmemPool_attribute attribute) const noexcept;  // of the pool; 0 if it cannot be read

  Shared& shared_;
  Context& context_;
  EventPool events_;
  std::mutex mutex_;  // held while a new stream takes its slot, so that a reset comes before or after it
  std::atomic<CUstream> allocating_{nullptr};
  std::atomic<CUstream> freeing_{nullptr};
  std::atomic<CUmemoryPool> pool_{nullptr};
};

}  // namespace cushion
