// Vmm (CUSHION_BACKING=vmm): the global arena's memory as handles of physical memory, mapped into reserved addresses.
// One object a context.
//
// The pool sees address space as a segment that begins as one block of the heap `unmapped` (heap.h). Memory is mapped
// where it extends free memory that lies there already, so the pool grows by what lacks and keeps no ends that are of
// no use; and a handle that is wholly free and clean can be unmapped, wherever it lies, and given back to the driver or
// mapped elsewhere: a request finds memory while there is enough of it in such handles, however scattered they are.
//
// Invariants, each of which a test breaks:
//  - a handle is the unit of unmapping: a mapping cannot be split. Only one that lies in one block of the clean heap is
//    unmapped, so none that the device may still use; and its range leaves the address map first;
//  - no driver call is made with a lock held that an allocation or free of the pool needs. `calls_`, which growing,
//    giving back and the context's end take, is held across them: none of these calls waits for work of the device
//    (measured beside a running kernel: map 1 µs, unmap 15 to 27, access 23 to 120);
//  - nothing is unmapped while a capture may be open (contract §6);
//  - once the pool was changed nothing allocates host memory: what is detached comes back;
//  - a handle counts as held from its creation until the driver has taken it back, whatever fails in between. What it
//    would not take back or unmap is asked again;
//  - the driver's mappings outlive their context (measured): discard() ends them, with `calls_` held since before the
//    arenas forgot them. Who comes to grow later, for a context that is gone by then, is turned away by generation.
//
// Costs, measured on an H200 (2 MiB to 256 MiB a handle): a new handle 35 µs, where cuMemAlloc takes 35 to 52; one
// given back 25 to 105 µs, where cuMemFree takes 29 to 145; a moved one about 40 µs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/arena.h"
#include "core/driver.h"
#include "core/patience.h"
#include "core/shared.h"

namespace cushion {

class Context;

class Vmm {
 public:
  // Bytes of a handle; multiples of the first.
  static constexpr std::uint64_t kSmallest = AddressMap::kPage;
  static constexpr std::uint64_t kLargest = std::uint64_t{64} << 20;

  Vmm(Shared& shared, Context& context, Gauge& held);

  // Whether the context's memory comes from here, and why it does or does not (a text that lives as long as the
  // process).
  bool on() const noexcept { return on_; }
  const char* why() const noexcept { return why_; }

  // Makes a free block for `need` in the global arena's clean heap: from handles that lie idle elsewhere, and from at
  // most `most` bytes of new ones, of which, if any, rather `roomy` in all, so that the next call needs none. Idle
  // handles are moved where they are more than a twentieth of what is held, or there are no new ones. Success: there is
  // such a block, or was until another thread took it. With the context current.
  struct Growth {
    CUresult result = CUDA_SUCCESS;
    bool limited = false;     // `most` is not enough
    std::uint64_t added = 0;  // bytes of new handles
  };
  Growth extend(const Need& need, std::uint64_t most, std::uint64_t roomy, std::uint64_t generation);
  // Bytes of handles that are wholly free and clean.
  std::uint64_t unused() noexcept;
  // Gives such handles back until no more than `keep` bytes are left. Their number.
  std::uint64_t release(std::uint64_t keep, std::uint64_t generation);
  // Another device may use the memory, what there is and what comes, or may no more.
  void admit(int device, bool on);
  // visit(address, bytes) for each stretch of mapped memory; false if another thread is making calls just now.
  template <class Visit>
  bool inspect(Visit visit) noexcept {
    std::unique_lock lock(calls_, std::try_to_lock);
    if (!lock) return false;
    for (const Range& range : ranges_) for_each_mapped(range, [&](const Run& run) { visit(run.address, run.bytes); });
    return true;
  }
  // While this is held nothing grows or goes back. Taken before the context's lock and the arena's.
  std::unique_lock<std::mutex> hold() { return std::unique_lock(calls_); }
  // The context is gone, and all that the arena knew with it: hold() since before that.
  void discard() noexcept;

 private:
  using Handle = CUmemGenericAllocationHandle;
  struct Piece {  // a handle where it is mapped
    Handle handle;
    std::uint64_t bytes;  // 0: none begins there
  };
  struct Range {  // reserved
    std::uint64_t address;
    std::uint64_t bytes;
    Piece* pages;  // for each page the handle that begins there
  };
  struct Run {  // neighbouring handles: in a free block, or taken out of the pool as one
    Block* block;
    std::uint64_t address;
    std::uint64_t bytes;
  };
  struct Plan {  // where memory is to be mapped
    Block* at = nullptr;
    std::uint64_t bytes = 0;  // that lack
    const Block* below = nullptr;
    const Block* above = nullptr;  // the free blocks that it will extend
  };

  const Driver& driver() const noexcept { return shared_.driver; }
  Piece& piece_at(std::uint64_t address) const noexcept;
  // visit(Run), as long ones as there are; it may unmap them.
  template <class Visit>
  static void for_each_mapped(const Range& range, Visit visit) {
    for (std::uint64_t page = 0; page < range.bytes / kSmallest;) {
      std::uint64_t end = page;
      while (end < range.bytes / kSmallest && range.pages[end].bytes != 0) end += range.pages[end].bytes / kSmallest;
      if (end != page) visit(Run{nullptr, range.address + page * kSmallest, (end - page) * kSmallest});
      page = std::max(end, page + 1);
    }
  }
  // What follows wants calls_, and this the global arena's lock too.
  Plan plan(const Need& need) const noexcept;
  Run whole_in(Block& free) const noexcept;  // the handles that lie wholly in a free block; 0 bytes if none
  template <class Visit>
  void for_each_idle(const Plan* but, Visit visit) const noexcept;
  std::uint64_t gather(const Plan* but) noexcept;      // into runs_; their bytes
  std::uint64_t choose(std::uint64_t bytes) noexcept;  // leaves in runs_ what holds so much, the largest first

  void prepare(std::uint64_t fresh);  // host memory for all that follows, of so many new bytes at most
  Growth extend_by(const Need& need, std::uint64_t most, std::uint64_t roomy, bool move);
  CUresult reserve(std::uint64_t bytes);
  CUresult create(std::uint64_t bytes) noexcept;  // into pieces_; none if it fails
  CUresult take_out(const Run& run) noexcept;     // unmaps, into pieces_; nothing changed if it fails
  CUresult map(const Run& at,
               std::size_t& stuck) noexcept;  // pieces_, with access; if it fails all but `stuck` of them
  void give_up(std::size_t from) noexcept;    // pieces_ from there on, and what was refused before

  Shared& shared_;
  Context& context_;
  Gauge& held_;
  const char* why_ = "";
  const bool on_;
  CUmemAllocationProp properties_{};

  std::mutex calls_;                     // protects what follows, and the number of segments
  std::vector<CUmemAccessDesc> access_;  // our own device first
  std::vector<Range> ranges_;
  std::vector<Range> stale_;    // of contexts that are gone, with mappings that the driver would not end
  std::vector<Piece> refused_;  // what it would not take back
  std::size_t handles_ = 0;     // created and not taken back
  std::vector<Run> runs_;       // of the call that is under way
  std::vector<Piece> pieces_;   // likewise: handles that are mapped nowhere
};

}  // namespace cushion
