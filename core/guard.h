// Guard (CUSHION_GUARD): bytes behind each block, filled when it is handed out and looked at when it is freed. What is
// found overwritten is told and counted (misuse.h). One object a context.
//
// Invariants, each of which a test breaks:
//  - no false alarm. Only the fill and the next owner of the bytes touch a guard by right, and the look comes after the
//    one and before the other: the fill of cudaMalloc is complete before the block is handed out, that of
//    cudaMallocAsync lies on its stream, and a free on another stream waits for it (where the program has ordered that
//    free behind its allocation, as it must, that is no wait). The look is ordered as the block's reuse is:
//      cudaFree that waited          read by the host after the wait
//      cudaFreeAsync                 copied on its stream, inside the free
//      cudaFree without a wait       copied on a stream of our own behind all that the context was given (fence.h); the
//                                    fence that makes the block clean comes later, and covers the copy
//  - no order is lost and none is made that a free does not make natively: a copied guard lies in pinned memory, and
//    the host looks there when an event says so, never waits. That memory holds the pattern beforehand, so what differs
//    came from the device, whenever it is looked at: at exit without a call to the driver;
//  - the pinned memory is our own pages, registered: nothing that a reset does makes them unreadable;
//  - nothing is filled, copied or waited for while a capture may be open or the context is broken or about to end, nor
//    is the guard of a block that another context's stream frees looked at. Where there is no fill there is no look,
//    and a look that cannot be had is counted (guards_skipped).
//
// What it cannot see: a write beyond the guard, one with the pattern's byte, one that comes after the free. A kernel
// that fills the device and waits for the host holds cudaMalloc's fill back. The fill of cudaMallocAsync on the legacy
// stream holds blocking streams back, as that of CUSHION_INIT does.
//
// Thread safe; its lock is a leaf and not held across a driver call.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/fence.h"
#include "core/lane.h"
#include "core/misuse.h"
#include "core/patience.h"
#include "core/shared.h"

namespace cushion {

class Context;

class Guard {
 public:
  static constexpr unsigned char kPattern = 0xFD;
  static constexpr std::uint64_t kMost = std::uint64_t{1} << 20;  // bytes

  Guard(Shared& shared, Context& context, std::uint64_t bytes) noexcept
      : shared_(shared), context_(context), bytes_(bytes) {}

  // Fills the guard of a block of `requested` bytes on its stream (null: now). False: the block must not be handed out,
  // because a fill may still be under way that nothing orders.
  bool set(std::uint64_t address, std::uint64_t requested, const StreamIdentity* stream) noexcept;
  // Inside a free of the block: by a stream, or (null) a cudaFree, whose wait is over if `waited`.
  void check(const FreedBlock& block, const StreamIdentity* stream, bool waited) noexcept;
  // The same where there can be no look.
  void skip(std::uint64_t address) noexcept;
  // Looks at what copies have brought.
  void poll() noexcept;
  // The same without the driver: what has not come yet is not seen.
  void finish(Patience patience) noexcept;
  // The context was reset or destroyed.
  void discard() noexcept;

 private:
  struct Filled {
    std::uint64_t stream = 0;  // its id; 0: complete
    FenceEvent event{};        // behind the fill on the stream
  };
  struct Copied {
    std::uint64_t id;
    unsigned char* bytes;  // pinned
    FenceEvent event;      // behind the copy; none: nothing says when it is over
    FreedBlock block;
  };

  const Driver& driver() const noexcept { return shared_.driver; }
  bool take(std::uint64_t address, Filled& filled) noexcept;
  FenceEvent record(CUstream stream) noexcept;
  bool look_now(const FreedBlock& block) noexcept;
  bool copy(const FreedBlock& block, const StreamIdentity* stream, const Filled& filled);
  unsigned char* pinned();  // null: there is none to be had
  void pin_more() noexcept;
  bool look_at(const Copied& copied, Overwritten& found) noexcept;  // with the lock held; whether it was overwritten
  void tell(const std::vector<Overwritten>& found) noexcept;

  Shared& shared_;
  Context& context_;
  const std::uint64_t bytes_;
  EventPool events_;
  std::mutex mutex_;                                  // protects what follows
  std::unordered_map<std::uint64_t, Filled> filled_;  // by block, those that have a guard
  std::vector<unsigned char*> spare_;                 // pinned, holding the pattern
  std::vector<Copied> copied_;                        // in the order of their frees
  std::uint64_t last_id_ = 0;
  std::uint64_t pinned_bytes_ = 0;
};

}  // namespace cushion
