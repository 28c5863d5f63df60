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
//    (measured beside a running kernel: map 1 µs, unmap 15 to 27, access 23 to 120; and they break no capture);
//  - the driver's mappings outlive their context (measured): discard() ends them.
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

  Vmm(Shared& shared, Context& context);

  // Whether the context's memory comes from here, and why it does or does not (a text that lives as long as the
  // process).
  bool on() const noexcept { return on_; }
  const char* why() const noexcept { return why_; }

  // Makes a free block for `need` in the global arena's clean heap: from handles that lie idle elsewhere, and from at
  // most `most` bytes of new ones, of which, if any, rather `roomy` in all, so that the next call needs none. Idle
  // handles are moved where they are more than a twentieth of what is held, or there are no new ones. Success: there is
  // such a block, or was until another thread took it. CUDA_ERROR_NOT_SUPPORTED: `most` is not enough.
  // `added`: bytes that are held more than before, whatever the answer.
  CUresult extend(const Need& need, std::uint64_t most, std::uint64_t roomy, std::int64_t& added);
  // Bytes of handles that are wholly free and clean.
  std::uint64_t unused();
  // Gives such handles back until no more than `keep` bytes are left.
  struct Released {
    std::uint64_t bytes = 0;
    std::uint64_t handles = 0;
  };
  Released release(std::uint64_t keep);
  // Another device may use the memory, what there is and what comes, or may no more.
  void admit(int device, bool on);
  // visit(address, bytes) for each stretch of mapped memory; false if the lock cannot be had in time.
  template <class Visit>
  bool inspect(Patience patience, Visit visit) {
    std::unique_lock lock(calls_, std::defer_lock);
    if (!lock_within(lock, patience)) return false;
    for (const Range& range : ranges_) for_each_mapped(range, [&](const Run& run) { visit(run.address, run.bytes); });
    return true;
  }
  // The context is gone, and all that the arena knew with it.
  std::int64_t discard();  // bytes more that the driver refuses to take back

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
  std::uint64_t number_in(const Run& run) const noexcept;  // of handles
  // The rest want calls_, and these the global arena's lock too.
  Plan plan(const Need& need) const noexcept;
  Run whole_in(Block& free) const noexcept;  // the handles that lie wholly in a free block; 0 bytes if none
  std::vector<Run> idle(const Plan* but) const;
  // Of the runs, what holds `bytes`, if they hold so much: the largest first.
  std::vector<Run> choose(std::vector<Run> runs, std::uint64_t bytes) const;

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
  CUresult extend_by(const Need& need, std::uint64_t most, std::uint64_t roomy, bool move, std::int64_t& added);
  CUresult reserve(std::uint64_t bytes);
  // Handles of `bytes` in all; none if it fails.
  CUresult create(std::uint64_t bytes, std::vector<Piece>& out, std::int64_t& added);
  CUresult map(const Run& at, const std::vector<Piece>& pieces);  // with access; nothing if it fails
  CUresult take_out(const Run& run, std::vector<Piece>& out);     // unmaps; nothing changed if it fails
  // To the driver, and what it refused before; the bytes that it took.
  std::uint64_t give_up(const std::vector<Piece>& pieces);

  Shared& shared_;
  Context& context_;
  const char* why_ = "";
  const bool on_;
  CUmemAllocationProp properties_{};

  std::mutex calls_;  // protects what follows, and the number of segments; taken before the arena's lock
  std::vector<CUmemAccessDesc> access_;
  std::vector<Range> ranges_;
  std::vector<Range>
      stale_;  // of contexts that are gone, with mappings that the driver would not end: they count as held
  std::vector<Piece> refused_;  // what the driver would not take back: it counts as held
};

}  // namespace cushion
