// Async allocator (CUSHION_ALLOCATOR=async): cudaMalloc served from the device's default stream-ordered pool, whose
// release threshold is raised so that freed memory stays there. cudaMallocAsync goes to the driver as natively, to the
// same pool unless the program has chosen another. No pool of our own: a reset of the device does not give back what
// such a pool holds. Of the default pool it gives back what is cached, but what is live stays allocated until the
// process ends (both measured). One object a context.
//
// A pool aligns blocks to 512 bytes only (measured), and requests above kBigRequest want kBigAlignment: they are asked
// for with room for it, and the first boundary inside is handed out. What the driver frees, and what it answers as
// the block's range, is the whole (PoolBlock::base).
//
// Invariants, each of which a test breaks:
//  - a block may be used by every stream when it is handed out: it is allocated on a stream of our own, on which
//    nothing else is waited for, and that stream is found complete before the answer;
//  - cudaMalloc never waits for work of the program's. A free that has yet to wait for the device goes on a second
//    stream, and where the driver, its memory short, makes the allocation wait for another stream's free, the host
//    waits at most OOM_WAIT (that work may itself wait for the host): then the call is the driver's;
//  - cudaFree waits for the block's whole context as natively. `deferred`: the second stream waits instead, on a fence
//    recorded inside the free (fence.h); where there can be no fence (an older driver, an open capture) it is a sync
//    free. Either way the driver gets the block back by cuMemFreeAsync;
//  - the pool may count and keep a freed block until the host has synchronised with the stream that it was freed on: so
//    do we, before a figure is read or the pool trimmed, and only when a query says that there is nothing to wait for;
//  - what cudaFree gives back, the pool counts as used until it next grows (measured). So what the program frees by it
//    out of cudaMallocAsync takes the way of a deferred free, which waits for nobody either;
//  - the pool's threshold is raised only from the driver's default, 0: a value that the program has set stays;
//  - beside a capture nothing is asked of the pool (even reading a figure would invalidate the capture), and what a
//    capture that begins meanwhile could forbid is done in relaxed mode;
//  - not served, the call is then the driver's: while a capture may be open, in a context that is broken or about to
//    end, once peer access was enabled (memory from a pool is out of peers' reach), on a device whose pools the program
//    manages (Runtime), and in any context but the device's primary one: memory of a pool is the device's, and
//    destroying a context the program made does not give it back. What was served before peer access stays reachable:
//    admit();
//  - a reset takes the context's streams and blocks along. Whoever comes back from a driver call looks at the
//    generation first.
//
// Not seen by unused(): what the driver's cudaFree gives back, until the pool grows. That is memory of
// cudaMallocFromPoolAsync and of other contexts, and memory of cudaMallocAsync where there can be no fence.
//
// The blocks are recorded by Runtime. Costs of a pair: two calls to allocate (cuMemAllocFromPoolAsync, cuStreamQuery),
// the wait and one call to free.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "core/fence.h"
#include "core/shared.h"

namespace cushion {

class Context;

struct PoolBlock {
  CUdeviceptr address = 0;  // handed out
  CUdeviceptr base = 0;     // the driver's name for it, at most kBigAlignment below
};

class AsyncAllocator {
 public:
  AsyncAllocator(Shared& shared, Context& context) noexcept : shared_(shared), context_(context) {}

  // False: not served; the call is the driver's. The caller looks at the context's generation once more when it records
  // the block.
  bool allocate(std::uint64_t bytes, PoolBlock* out) noexcept;
  // cudaFree of a block that was handed out, by one thread alone. On an error the block stays live.
  CUresult free(CUdeviceptr base) noexcept;
  // The same without a wait of the host: behind all that the context was given so far. Nothing: there can be no fence,
  // and nothing was done.
  std::optional<CUresult> free_in_order(CUdeviceptr base) noexcept;

  // The device's default pool, its threshold raised; null if there is none, or nothing is served from it here.
  CUmemoryPool prepare() noexcept;
  // Makes the pool's memory accessible from `device`.
  void admit(CUdevice device) noexcept;

  // Memory is short elsewhere: the pool gives back what it does not use, if need be after a wait of at most
  // `patience_ns` for what is freed and still in use by the context. Whether anything went back.
  bool trim(std::uint64_t patience_ns) noexcept;
  // What the pool holds and nobody uses, in bytes; 0 while a capture may be open. About 2 µs.
  std::uint64_t unused() noexcept;

  // The context was reset or destroyed.
  void discard() noexcept;

 private:
  const Driver& driver() const noexcept { return shared_.driver; }
  // The stream in `slot`; if there is none yet, one that was left and is idle again, or a new one. Null if the driver
  // refuses.
  CUstream open(std::atomic<CUstream>& slot, std::uint64_t generation) noexcept;
  CUstream idle_again(std::uint64_t generation) noexcept;
  void leave(CUstream stream, std::uint64_t generation) noexcept;
  // Fills the block as INIT says and waits for the stream that it was allocated on. False: not in time, or an error.
  bool make_ready(CUdeviceptr address, std::uint64_t bytes, CUstream stream, std::uint64_t generation) noexcept;
  void keep_unused(CUdeviceptr base, std::uint64_t generation) noexcept;
  void give_back(CUstream stream, std::uint64_t generation) noexcept;
  // CUDA_ERROR_NOT_READY: not in time.
  CUresult completes(CUstream stream, std::uint64_t patience_ns) noexcept;
  bool order_after_all(CUstream stream) noexcept;
  CUresult free_on(CUstream stream, CUdeviceptr base, std::uint64_t generation) noexcept;

  // Synchronises with our streams, and so tells the pool what is free. Waits for the first one as long as an idle
  // device takes, and for the second, which carries the deferred frees, at most `patience_ns`. Whether both were
  // complete.
  bool settle(std::uint64_t patience_ns) noexcept;
  bool settle(CUstream stream, std::uint64_t patience_ns) noexcept;
  bool trim_once() noexcept;
  std::uint64_t figure(CUmemPool_attribute attribute) const noexcept;  // of the pool; 0 if it cannot be read
  std::uint64_t held() const noexcept { return figure(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); }

  Shared& shared_;
  Context& context_;
  EventPool events_;
  // Held while a new stream takes its slot, so that a reset comes before or after it; protects the lists.
  std::mutex mutex_;
  // Blocks that could not be handed out; they go back when the next cannot, or memory is short, if the driver does not
  // take them at once.
  std::vector<CUdeviceptr> unused_;
  // Streams whose allocation had to wait for another stream's work. Other threads may still be using them.
  std::vector<CUstream> left_;
  // Shared: while something that may wait is put on our streams. Alone, and only ever tried: from the query that finds
  // a stream complete to the end of the synchronisation with it, which then has nothing to wait for.
  std::shared_mutex submitting_;
  std::atomic<CUstream> allocating_{nullptr};
  std::atomic<CUstream> freeing_{nullptr};
  std::atomic<CUmemoryPool> pool_{nullptr};
};

}  // namespace cushion
