// Quarantine (CUSHION_QUARANTINE): freed blocks are held back, first in, first out, until so many bytes of them are
// held. They are filled with a pattern when they come and looked at when they go: whatever else is there was written
// after the free, which is told and counted (misuse.h). One object a context.
//
// A held block is neither live nor free: it has left the program's hands (its tallies, the report's list, its stack's
// figures), and its arena counts it as handed out. A second free of it is an error, as of any freed block.
//
// Invariants, each of which a test breaks:
//  - no false alarm: the fill comes after all right use of the block, in the order that its free had (on the stream of
//    a cudaFreeAsync; now, after the wait of a cudaFree; behind all that the context was given, for a cudaFree without
//    a wait), and a block is looked at only once an event behind its fill is complete. A reset meanwhile: nothing is
//    said;
//  - nobody waits for work of the program's. A block whose fill is not complete stays although its time has come, until
//    twice the bytes are held: then it goes without a look, which is counted (quarantine_skipped);
//  - a block that goes is as one that was freed now: a fence later than that makes it clean, which covers its fill;
//  - short memory empties it, and so does a context that is about to end. A reset discards it;
//  - nothing is filled or looked at while a capture may be open, or the context is broken or about to end; blocks that
//    are larger than the quarantine, or freed on another context's stream, are not held.
//
// What it cannot see: reads, writes with the pattern's byte, what is written later than the look, and what is still
// held when the process ends without destroying its context.
//
// Thread safe; its lock is a leaf and not held across a driver call.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

#include "core/arena.h"
#include "core/fence.h"
#include "core/misuse.h"
#include "core/shared.h"

namespace cushion {

class Context;

class Quarantine {
 public:
  static constexpr unsigned char kPattern = 0xDD;

  struct Held {
    Block* block = nullptr;
    std::uint64_t size = 0;  // of all of the block
    Arena* arena = nullptr;
    std::uint64_t generation = 0;  // the arena's
    FenceEvent filled{};           // behind the fill
    FreedBlock freed{};
  };

  Quarantine(Shared& shared, Context& context) noexcept;

  bool on() const noexcept { return most_ != 0; }
  bool holds(std::uint64_t size) const noexcept { return size <= most_; }

  // Fills held.block in the order of its free: on a stream, or (null) a cudaFree, whose wait is over if `waited`.
  enum class Filled {
    no,
    yes,        // held.filled will say when it is complete
    unordered,  // perhaps, and nothing will say when: only the order of the whole context, or the stream's, covers it
    lost,       // perhaps, and not even that covers it: the block must not be used again
  };
  Filled fill(Held& held, const StreamIdentity* stream, bool waited) noexcept;
  // A block that was filled, and has left the program's hands. Then whose time has come goes.
  void add(const Held& held) noexcept;
  // Everything goes, looked at where that can be. Whether there was anything.
  bool empty() noexcept;
  std::uint64_t bytes() const noexcept;
  void discard() noexcept;  // the context was reset or destroyed

 private:
  const Driver& driver() const noexcept { return shared_.driver; }
  bool let_go(std::uint64_t keep, std::uint64_t most_unlooked) noexcept;  // whether any went
  bool look(const Held& held) noexcept;
  void release(Held& held) noexcept;

  Shared& shared_;
  Context& context_;
  const std::uint64_t most_;  // bytes
  EventPool events_;
  mutable std::mutex mutex_;  // protects what follows
  std::deque<Held> held_;     // the first to go in front
  std::uint64_t bytes_ = 0;
};

}  // namespace cushion
