// Memory pools: stream-ordered allocation.
//
// A pool takes chunks of whole pages and cuts blocks out of them at multiples of 512 bytes, whatever their size. A
// block freed on a stream may be handed out again on that stream at once, and elsewhere only when its free is complete
// or ordered before the asking stream by an event; a busy stream's block never goes to an independent one (contract §3,
// measured). When the device is full it does, and the asking stream is made to wait for the free (the manual).
//
// A free that is complete is noticed when the host synchronises with the stream or context it was put on; one by
// cuMemFree, which is put on none, when the pool next grows or trims (both measured). Until then `used` counts the
// block and its chunk stays. Invariant: a byte of a chunk belongs to exactly one of a live block, a free that was not
// noticed, and the pool's space. At a synchronisation the pool gives the device the free chunks that exceed its
// threshold.
//
// Memory of a pool is its device's: it outlives the context it was allocated in. Only the default pool's ends
// with the primary one (measured).
#pragma once

#include <list>

#include "memory.h"

namespace emu {

struct Driver;

struct Pool : std::enable_shared_from_this<Pool> {
  struct Free {
    Range range;
    std::size_t bytes;      // of `used` it still accounts for
    std::uint64_t context;  // of the stream where it was freed; 0 for no stream
    std::uint64_t stream;   // that stream, and how many tasks it had by then
    std::uint64_t count;
    Tasks fence;  // done: anybody may have it
    Clock clock;  // what the free comes after
  };

  CUmemoryPool handle = nullptr;
  CUdevice device = 0;
  bool alive = true;
  std::map<std::uintptr_t, std::size_t> chunks;
  FreeRanges space;
  std::list<Free> free;  // not noticed yet
  std::uint64_t threshold = 0;
  std::uint64_t reserved = 0, reserved_high = 0;
  std::uint64_t used = 0, used_high = 0;
  int reuse_follow_events = 1, reuse_opportunistic = 1, reuse_internal = 1;
  std::map<CUdevice, CUmemAccess_flags> access;

  CUdeviceptr Allocate(Stream& stream, std::size_t bytes);
  void FreeOn(Stream& stream, const BlockPtr& block);
  void FreeAfter(const BlockPtr& block, const Tasks& fence);
  void Discard(const Block& block);  // its context ended
  void Trim(std::uint64_t keep);     // gives back free chunks

  template <class Predicate>
  void Notice(Predicate noticed);
  void NoticeAll();
  bool Admits(CUdevice other) const;  // not asked of its own device

 private:
  template <class Allowed>
  std::optional<Range> Reuse(Stream& stream, std::size_t size, const Allowed& allowed);
  std::optional<Range> Grow(std::size_t size);
};

CUmemoryPool NewPool(Driver& driver, CUdevice device);

// What the pools do when the host has waited for a stream, a context or something of the device's.
void AfterSynchronize(const Stream& stream);
void AfterSynchronize(const Context& context);
void AfterSynchronize(CUdevice device);

// The device's primary context ended, and its work.
void ResetDefaultPool(Device& device);

}  // namespace emu
