// Memory pools: stream-ordered allocation.
//
// A block freed on a stream may be handed out again on that stream at once, and elsewhere only when its free is
// complete or ordered before the asking stream by an event; a busy stream's block never goes to an independent one
// (contract §3, measured). When the device is full it does, and the asking stream is made to wait for the free (the
// manual). Invariant: a range belongs to exactly one of a live block, the pool's free list, or the device. At a
// synchronisation the pool gives the device what exceeds its release threshold.
#pragma once

#include <list>

#include "memory.h"

namespace emu {

struct Driver;

struct Pool : std::enable_shared_from_this<Pool> {
  struct Free {
    Range range;
    std::uint64_t stream;  // where it was freed, and how many tasks that stream had by then; 0 for no stream
    std::uint64_t count;
    Tasks fence;  // done: anybody may have it
  };

  CUmemoryPool handle = nullptr;
  CUdevice device = 0;
  bool alive = true;
  std::list<Free> free;
  std::uint64_t threshold = 0;
  std::uint64_t reserved = 0, reserved_high = 0;
  std::uint64_t used = 0, used_high = 0;
  int reuse_follow_events = 1, reuse_opportunistic = 1, reuse_internal = 1;
  std::map<CUdevice, CUmemAccess_flags> access;

  CUdeviceptr Allocate(Stream& stream, std::size_t bytes);
  void FreeOn(Stream& stream, const BlockPtr& block);
  void FreeAfter(const BlockPtr& block, const Tasks& fence);
  void Discard(const Block& block);  // back to the device: its context ended
  void Trim(std::uint64_t keep);
  bool Admits(CUdevice other) const;  // not asked of its own device

 private:
  void Park(const BlockPtr& block, std::uint64_t stream, std::uint64_t count, Tasks fence);
};

CUmemoryPool NewPool(Driver& driver, CUdevice device);

void TrimDevice(CUdevice device, std::uint64_t keep);

// What the pools of a device do when the host waited for its work.
void TrimAtSynchronize(CUdevice device);

}  // namespace emu
