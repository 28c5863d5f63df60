// Context: all of Cushion's device memory in one CUDA context. It joins the three questions: which bytes (pool.h), who
// may have them (heap.h), when are they clean (fence.h). Its functions are the product's allocation and free paths.
//
// Locks: one mutex a context, held for list and bit operations only, never across a driver call, and never two
// contexts' at once. Every function that leaves it for a driver call looks at the generation (EventPool's) when it
// returns: a reset in between has discarded everything.
//
// How an allocation is served, in this order (contract §3 and §6; the first that succeeds):
//   1. the stream's own freed blocks, clean blocks, blocks that the program has ordered before the stream
//   2. the same again after asking the fences
//   3. a new segment, unless MAX_SIZE or the driver refuses
//   4. another stream's freed block, the stream made to wait on the event recorded inside that free
//   5. a bounded wait for freed blocks; then wholly unused segments go back and the driver is asked again
//   6. the native call; if it answers out of memory, every context gives back what it can, and the call once more: what
//      the program is told is what the driver said
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/async.h"
#include "core/fence.h"
#include "core/patience.h"
#include "core/pool.h"
#include "core/shared.h"

namespace cushion {

// Who a stream is. Handles are reused after destroy, ids are not.
struct StreamIdentity {
  CUstream handle = nullptr;
  std::uint64_t id = 0;
  long owner_thread = 0;  // for a per-thread stream: the only thread that may use the handle
};

struct Request {
  std::uint64_t bytes = 0;
  Api api = Api::malloc;
  const StreamIdentity* stream = nullptr;  // null: host-ordered (cudaMalloc)
};

class Context {
 public:
  Context(Shared& shared, CUcontext handle, CUdevice device, std::uint64_t device_bytes, bool primary);

  CUcontext handle() const noexcept { return handle_; }
  CUdevice device() const noexcept { return device_; }
  std::uint64_t device_bytes() const noexcept { return device_bytes_; }
  bool primary() const noexcept { return primary_; }

  // False: not served; the call is the driver's.
  bool allocate(const Request& request, CUdeviceptr* out) noexcept;

  // Frees of a block of this context. `block` came from the address map without a lock: it is checked again. Answers
  // what the native call would: CUDA_ERROR_INVALID_VALUE for a pointer that is no live block's start.
  CUresult free(Block* block, std::uint64_t address) noexcept;  // cudaFree
  CUresult free_async(Block* block, std::uint64_t address, const StreamIdentity& stream,
                      Context& stream_context) noexcept;

  // The program's events: a heap's place now, and an order that the program made.
  struct Position {
    std::uint64_t serial = 0;  // 0: no stream-ordered block was ever freed there
    std::uint64_t stamp = 0;
    std::uint64_t generation = 0;
    std::uint32_t index = 0;
    std::vector<Heap::Before> before;
  };
  Position position(std::uint64_t stream_id);
  void order_after(const StreamIdentity& stream, const Position& position);

  // Around the program's own cuCtxSynchronize: what was freed before the call is clean after it.
  std::uint64_t stamp() const noexcept { return fences_.stamp(); }
  std::uint64_t generation() const noexcept { return events_.generation(); }
  void synchronized(std::uint64_t stamp, std::uint64_t generation);

  void stream_going(const StreamIdentity& stream);  // before the real destroy

  // Around a call that may end the context: while closing it serves nothing; discard() forgets what it had.
  void closing(bool on) noexcept { closing_.fetch_add(on ? 1 : -1, std::memory_order_relaxed); }
  void discard();

  // Memory is short elsewhere: gives back what is clean and unused. `patience_ns` bounds the wait for freed blocks.
  // Returns the number of segments given back.
  std::uint64_t relieve(std::uint64_t patience_ns);
  std::uint64_t unused() noexcept;

  // What another allocator in this context needs of it (async.h).
  AsyncAllocator& async() noexcept { return async_; }
  bool serves() const noexcept { return closing_.load(std::memory_order_relaxed) == 0 && broken() == CUDA_SUCCESS; }
  CUresult wait_idle() noexcept;  // as long as the native cudaFree would
  // Makes `stream` wait for everything submitted so far to the context and to peers that may use its memory. False: no
  // fence can be had now.
  bool order_after_all(CUstream stream) noexcept;
  // Whether all that completes within `patience_ns`. False also where no fence can be had.
  bool becomes_idle(std::uint64_t patience_ns) noexcept;
  void take_spare();  // for waits without a fence: see spare_

  // The code of the sticky error that a call of ours met, or CUDA_SUCCESS. While set, nothing is served.
  CUresult broken() const noexcept { return static_cast<CUresult>(broken_.load(std::memory_order_relaxed)); }

  // Whether the handle still names the context this object was made for: false after discard(), until revive() (the
  // caller has made sure that the handle is a context again).
  bool alive() const noexcept { return alive_.load(std::memory_order_acquire); }
  void revive() noexcept { alive_.store(true, std::memory_order_release); }

  void broke(CUresult sticky) noexcept { note(sticky); }

  // Readable without the lock.
  const Usage& usage() const noexcept { return usage_; }
  const Counters& counters() const noexcept { return counters_; }

  // For the report and tests, under the lock; false if the lock cannot be had in time.
  template <class Visit>
  bool inspect(Patience patience, Visit visit) noexcept {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!lock_within(lock, patience)) return false;
    visit(static_cast<const Pool&>(pool_));
    return true;
  }

 private:
  struct Need {
    std::uint64_t size;  // rounded up
    std::uint64_t alignment;
  };
  struct Evented {  // a free block beside the bins, with the event recorded inside its free
    Block* block;
    FenceEvent event;
    std::uint64_t serial;  // of the stream heap it was freed in; 0: another context's stream, only the event counts
    bool being_queried;
  };

  const Driver& driver() const noexcept { return shared_.driver; }
  const Options& options() const noexcept { return *shared_.options; }
  bool note(CUresult result) noexcept;  // remembers a sticky error; true for success

  // All of these want the lock.
  Heap* heap_of(const StreamIdentity& stream);
  Heap* find_heap(std::uint64_t stream_id) noexcept;
  Block* try_take(const Need& need, const Request& request);
  void hand_out(Block& block, const Request& request) noexcept;
  void clean_up() noexcept;  // moves what is known clean to the clean heap, recycles heaps that say nothing any more
  std::vector<CUdeviceptr> detach_unused(std::uint64_t keep);  // takes clean, wholly free segments out of the pool
  std::uint64_t newest_free() const noexcept;
  void account_free(const Block& block) noexcept;

  // Takes a live block for one free alone: of two frees of one pointer a single one wins. What a free does without the
  // lock after that is good only if the generation, read with the claim, is still the same: a reset recycles the
  // record.
  static bool claim(Block& block, std::uint64_t address) noexcept;

  // These want it released. Those without noexcept keep lists in host memory; their callers' callers catch.
  Block* search(const Need& need, const Request& request);
  Block* grow(const Need& need, const Request& request, bool exact, CUresult& why);
  Block* steal(const Need& need, const Request& request);
  Block* wait_for_blocks(const Need& need, const Request& request);
  template <class Call>
  CUresult on_stream(CUstream stream, Call call) noexcept;
  bool fill(const Block& block, const Request& request) noexcept;
  bool record_fence(Fence& fence);  // fills fence.events; false, and none taken, if there can be no fence now
  bool is_complete(std::span<const FenceEvent> events) noexcept;
  void unclaim(Block& block, std::uint64_t address) noexcept;  // the free failed: the block is live again
  void poll();  // asks the fences, takes a new one if frees lack one, cleans up
  void poll_evented();
  void poll_streams();
  bool streams_idle();  // without context fences: whether every known stream is idle; makes no dependency
  CUresult wait_for_context(std::uint64_t& ticks_taken);  // as long as the native cudaFree would
  CUresult native_wait(std::uint64_t& ticks_taken);       // by freeing a small spare allocation
  std::uint64_t release_unused(std::uint64_t keep);       // the number of segments given back
  std::uint64_t give_back(const std::vector<CUdeviceptr>& segments, std::uint64_t generation) noexcept;
  bool context_fences() const noexcept;

  Shared& shared_;
  const CUcontext handle_;
  const CUdevice device_;
  const std::uint64_t device_bytes_;
  const bool primary_;

  std::mutex mutex_;  // protects everything below but the atomics
  Pool pool_;
  FenceSet fences_;
  EventPool events_;
  Heap* clean_ = nullptr;
  Heap* pending_ = nullptr;
  std::unordered_map<std::uint64_t, Heap*> stream_heaps_;  // by stream id
  std::vector<Evented> evented_;
  // A byte of device memory that native_wait() frees, held beforehand: a full device must still be able to free.
  CUdeviceptr spare_ = 0;
  int spare_users_ = 0;         // waiters that are freeing one and will bring one back
  Usage usage_;                 // bumped under the lock, readable without
  Counters counters_;           // likewise: those of the allocation and free paths
  std::uint64_t promised_ = 0;  // bytes being asked of the driver just now
  int growing_ = 0;             // threads asking
  bool initial_done_ = false;
  std::size_t tidy_at_ = 64;        // so many stream heaps: time to see which are of use
  std::vector<CUevent> farewells_;  // old drivers: recorded on streams when they were destroyed
  bool pressure_ = false;           // growth was refused: cudaFreeAsync records its event inside itself (contract §3)

  std::atomic<bool> alive_{true};
  std::atomic<int> closing_{0};
  std::atomic<int> broken_{0};
  std::atomic<CUstream> fill_stream_{nullptr};

  AsyncAllocator async_;
};

}  // namespace cushion
