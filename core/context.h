// Context: all of Cushion's device memory in one CUDA context. It joins the three questions: which bytes (pool.h), who
// may have them (lane.h, heap.h), when are they clean (fence.h). Its functions are the product's allocation and free
// paths.
//
// How an allocation is served, in this order (contract §3 and §6; the first that succeeds):
//   1. its lane's magazine: under the lane's lock alone
//   2. its arena: the stream's own freed blocks, clean blocks, blocks that the program has ordered before the stream;
//      a stream's, thread's or bin's arena asks the global one for a superblock
//   3. the same again after asking the fences, and again with what lay in other lanes' magazines
//   4. a new segment, unless MAX_SIZE refuses (then 7, if the driver has memory) or the driver does
//   5. the driver has no more: another stream's freed block, the stream made to wait on the event recorded inside that
//      free. Never where other memory can be had: the work before that free may be waiting for what the stream does
//      next
//   6. a bounded wait for freed blocks; then wholly unused segments go back and the driver is asked again
//   7. the native call; if it answers out of memory, every context gives back what it can, and the call once more: what
//      the program is told is what the driver said
//
// Locks, in the order in which they are taken: Vmm's, the context's, an arena's, a lane's, the fences'. None but Vmm's
// is held across a driver call (vmm.h), and never two contexts', two arenas' or two lanes' at once. Every function that
// leaves its lock for a driver call looks at the generation when it returns: a reset in between has discarded
// everything.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/arena.h"
#include "core/async.h"
#include "core/fence.h"
#include "core/guard.h"
#include "core/lane.h"
#include "core/mutation.h"
#include "core/patience.h"
#include "core/pool.h"
#include "core/quarantine.h"
#include "core/shared.h"
#include "core/vmm.h"

namespace cushion {

struct Request {
  std::uint64_t bytes = 0;
  Api api = Api::malloc;
  const StreamIdentity* stream = nullptr;  // null: host-ordered (cudaMalloc)
  Note note{};
};

class Context {
 public:
  static constexpr int kHostLanes = 32;

  Context(Shared& shared, CUcontext handle, CUdevice device, std::uint64_t device_bytes, bool primary);

  CUcontext handle() const noexcept { return handle_; }
  CUdevice device() const noexcept { return device_; }
  std::uint64_t device_bytes() const noexcept { return device_bytes_; }
  bool primary() const noexcept { return primary_; }

  // False: not served; the call is the driver's.
  bool allocate(const Request& request, CUdeviceptr* out) noexcept;

  // Frees of a block of this context. What was found came from the address map without a lock: it is claimed here.
  // Answers what the native call would: CUDA_ERROR_INVALID_VALUE for a pointer that is no live block's start.
  struct Found {
    Block* block;
    std::uint64_t address;
    Arena* arena;
    std::uint64_t generation;  // the arena's, read before the block is claimed
  };
  static Found find(const Segment& segment, std::uint64_t address) noexcept {
    Arena* arena = segment.arena();
    const std::uint64_t generation = arena->generation();
    return {segment.block_at(address), address, arena, generation};
  }
  // cudaFree. Of an exported block it waits in every mode (contract §5).
  CUresult free(const Found& found, bool exported = false) noexcept;
  CUresult free_async(const Found& found, const StreamIdentity& stream, Context& stream_context) noexcept;
  // The answer to a free of what is no live block's start: counted, and told where the program is watched (misuse.h).
  [[gnu::noinline]] static CUresult wrong_free(Shared& shared, std::uint64_t address, const char* call) noexcept;

  // The program's events: a stream's place now, and an order that the program made.
  struct Position {
    std::uint64_t serial = 0;  // of the lane; 0: the stream is not known
    std::uint64_t stamp = 0;
    std::uint64_t generation = 0;
    Lane* lane = nullptr;
    std::vector<Lane::Before> before;
  };
  Position position(std::uint64_t stream_id);
  void order_after(const StreamIdentity& stream, const Position& position);

  // Around the program's own cuCtxSynchronize: what was freed before the call is clean after it.
  std::uint64_t advance() noexcept { return fences_.advance(); }
  std::uint64_t generation() const noexcept { return events_.generation(); }
  void synchronized(std::uint64_t stamp, std::uint64_t generation);

  void stream_going(const StreamIdentity& stream);  // before the real destroy

  // Around a call that may end the context: while closing it serves nothing; discard() forgets what it had.
  void closing(bool on) noexcept {
    if (on && watches_ && alive()) last_look();
    closing_.fetch_add(on ? 1 : -1, std::memory_order_relaxed);
  }
  void discard();

  // Memory is short elsewhere: gives back what is clean and unused. `patience_ns` bounds the wait for freed blocks.
  // Returns the number of segments given back.
  std::uint64_t relieve(std::uint64_t patience_ns);
  // Gives back what was free for IDLE_RELEASE, if that has passed since the last time: two loads and a clock of 5 ns if
  // not. As all that goes back by cuMemFree, only while the device is idle.
  void release_idle();
  std::uint64_t unused() noexcept;

  // What another allocator in this context needs of it (async.h).
  AsyncAllocator& async() noexcept { return async_; }
  bool serves() const noexcept { return closing_.load(std::memory_order_relaxed) == 0 && broken() == CUDA_SUCCESS; }
  bool context_fences() const noexcept;
  CUresult wait_idle() noexcept;  // as long as the native cudaFree would
  // Makes `stream` wait for everything submitted so far to the context and to peers that may use its memory. False: no
  // fence can be had now.
  bool order_after_all(CUstream stream) noexcept;
  // Whether all that completes within `patience_ns`. False also where no fence can be had.
  bool becomes_idle(std::uint64_t patience_ns) noexcept;
  void take_spare();  // for waits without a fence: see spare_

  // Streams of Cushion's own, non-blocking, so that nothing of the program is waited for. What is put on `fill` and
  // `look` has nothing to wait for, what is put on `behind_all` may have.
  enum class Own { fill, look, behind_all };
  CUstream own_stream(Own which) noexcept;  // with the context current; null: the driver refuses
  // Runs call(stream), a call of Cushion's own on a stream of the program's. While a blocking stream captures, touching
  // the legacy stream would invalidate the capture (contract §4): then it is not called.
  template <class Call>
  CUresult on_stream(CUstream stream, Call call) noexcept {
    if (!is_legacy(stream)) return call(stream);
    if (!shared_.gate.enter()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    const CUresult result = call(stream);
    shared_.gate.leave();
    return result;
  }
  // Copies device memory that nobody is writing to the host, now; with the context current. False: an error.
  bool read_back(std::uint64_t address, void* to, std::uint64_t bytes) noexcept;
  // Another device may use the context's memory, or may no more.
  void admit(CUdevice device, bool on) noexcept;
  Arena& global() const noexcept { return *arenas_[0].load(std::memory_order_relaxed); }
  Vmm& vmm() noexcept { return vmm_; }
  Guard& guard() noexcept { return guard_; }
  Quarantine& quarantine() noexcept { return quarantine_; }
  void release(const Quarantine::Held& held) noexcept;  // to its arena, as freed now

  // The code of the sticky error that a call of ours met, or CUDA_SUCCESS. While set, nothing is served.
  CUresult broken() const noexcept { return static_cast<CUresult>(broken_.load(std::memory_order_relaxed)); }

  // Whether the handle still names the context this object was made for: false after discard(), until revive() (the
  // caller has made sure that the handle is a context again).
  bool alive() const noexcept { return alive_.load(std::memory_order_acquire); }
  void revive() noexcept { alive_.store(true, std::memory_order_release); }

  bool note(CUresult result) noexcept;  // remembers a sticky error; true for success
  // Whether work of Cushion's own may be put on streams now.
  bool may_submit() const noexcept { return serves() && !shared_.gate.may_be_open(); }

  // Brings the gauges up to date: what the lanes have not told them yet.
  void settle() noexcept;

  // Readable without any lock: the gauges, and what the lanes have not told them yet.
  Usage usage() const noexcept;
  template <class Visit>
  void for_each_tally(Visit visit) const noexcept {
    for (const auto& lane : host_) visit(lane->tally);
    // Acquire: who sees a lane sees it whole. Lanes are added at the front and never removed.
    for (const LaneNode* node = all_lanes_.load(std::memory_order_acquire); node != nullptr; node = node->next)
      visit(node->lane.tally);
  }

  // For the report and tests: visit(const Pool&) for the pool of each arena, under its lock; false if a lock cannot be
  // had in time.
  template <class Visit>
  bool inspect(Patience patience, Visit visit) noexcept {
    for (const auto& slot : arenas_) {
      Arena* arena = slot.load(std::memory_order_acquire);
      if (arena == nullptr) continue;
      std::unique_lock lock(arena->mutex, std::defer_lock);
      if (!lock_within(lock, patience)) return false;
      visit(static_cast<const Pool&>(arena->pool));
    }
    return true;
  }

 private:
  struct LaneNode {
    Lane lane;
    LaneNode* next;
  };

  const Driver& driver() const noexcept { return shared_.driver; }
  const Options& options() const noexcept { return *shared_.options; }

  // ---- lanes
  LaneRef lane_of(const StreamIdentity* stream) noexcept;  // as remembered: to be entered
  LaneRef enter_lane(const StreamIdentity* stream);        // entered: the caller leaves it
  [[gnu::noinline]] LaneRef enter_lane_anew(const StreamIdentity* stream);
  LaneRef find_or_make_lane(const StreamIdentity& stream);  // with the context's lock held
  Lane* make_lane();                                        // likewise
  void end_lane(Lane& lane) noexcept;                       // likewise
  bool drain(Lane& lane) noexcept;                          // likewise: empties its magazine; whether it held any
  void give_cached(Block* stack, LaneRef by) noexcept;      // likewise: to its arena, each of the stack
  void tidy_lanes();
  std::uint64_t takes_through(const Lane& lane) const noexcept {
    return lane.is_stream() || mutated(Mutation::host_lane_takes_unclean) ? kAnyStamp : fences_.clean_through();
  }

  // ---- allocation
  Need need_of(std::uint64_t bytes) const noexcept;
  Need superblock_for(const Need& need) const noexcept;
  bool refuses(std::uint64_t bytes) const noexcept;
  Arena& arena_of(const Need& need, LaneRef by);
  Arena& make_arena(unsigned index);  // with the context's lock held
  static unsigned arena_of_lane(const Lane& lane) noexcept { return 1 + lane.number() % (Lane::kArenas - 1); }
  // A block handed out: copied under the lock that it was taken under, because a reset may recycle its record next.
  struct Grant {
    Block* block = nullptr;
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    explicit operator bool() const noexcept { return block != nullptr; }
  };
  [[gnu::always_inline]] Grant hand_out(Block& block, const Request& request) const noexcept;
  [[gnu::noinline]] bool allocate_slowly(const Need& need, const Request& request, LaneRef by, Grant grant,
                                         CUdeviceptr* out);
  // These want no lock held. Those without noexcept keep lists in host memory; their callers' callers catch.
  Grant take(Arena& arena, const Need& need, const Request& request, LaneRef by);
  Grant take_again(Arena& arena, const Need& need, const Request& request, LaneRef by);
  Grant search(Arena& arena, const Need& need, const Request& request, LaneRef by);
  bool refill(Arena& arena, const Need& need, LaneRef by);
  bool has_clean(const Need& need) noexcept;  // the global arena, a free block for it
  bool grow(const Need& need, bool exact, CUresult& why);
  bool driver_has(std::uint64_t bytes) noexcept;
  Grant steal(Arena& arena, const Need& need, const Request& request, LaneRef by);
  Grant wait_for_blocks(Arena& arena, const Need& need, const Request& request, LaneRef by);
  bool fill(std::uint64_t address, const Request& request) noexcept;
  void take_back(const Grant& grant, const Request& request, LaneRef by);

  // ---- free
  // Gives a claimed block back: into its lane's magazine, else to its arena. `stream`: null for cudaFree.
  void give(const Found& freed, const StreamIdentity* stream, bool clean);
  template <class Keep>
  bool depart(const Found& freed, LaneRef by, Keep keep);
  void give_now(const Found& freed, const StreamIdentity* stream, bool clean);  // without a look at it
  // What a free looks at and does besides. True: the block is held back. `clean` is false afterwards where a fill may
  // still be under way.
  [[gnu::noinline]] bool watch(const Found& freed, const StreamIdentity* stream, bool& clean);
  [[gnu::noinline]] void last_look() noexcept;
  [[gnu::noinline]] void give_to_arena(const Found& freed, LaneRef by, std::uint64_t stamp, Magazine::Given given,
                                       bool is_host);
  bool return_superblocks(Arena& arena, std::uint64_t keep);  // to the global arena; whether there were any
  bool collect();  // empties every magazine, returns every idle superblock; whether there was anything
  [[gnu::noinline]] void note_wait(std::uint64_t taken) noexcept;  // of a cudaFree
  // Whether a cudaFree may return now and its wait be paid later (single_order.h).
  bool owes_wait() noexcept;
  [[gnu::noinline]] CUresult free_evented(const Found& freed, const StreamIdentity& stream, Context& stream_context);

  // ---- fences
  bool record_fence(Fence& fence);  // fills fence.events; false, and none taken, if there can be no fence now
  bool is_complete(std::span<const FenceEvent> events) noexcept;
  // Asks the fences, takes a new one if frees (up to `newest`) lack one, cleans up.
  void poll(std::uint64_t newest = 0);
  void poll_evented(Arena& arena);
  void poll_streams();
  bool streams_idle();  // without context fences: whether every known stream is idle; makes no dependency
  CUresult wait_for_context(std::uint64_t& ticks_taken);  // as long as the native cudaFree would
  CUresult native_wait(std::uint64_t& ticks_taken);       // by freeing a small spare allocation

  // ---- giving memory back
  struct Piece {  // of the driver's memory
    CUdeviceptr address;
    std::uint64_t bytes;
  };
  std::uint64_t release_unused(std::uint64_t keep);      // the number of segments and handles given back
  std::vector<Piece> detach_unused(std::uint64_t keep);  // takes clean, wholly free segments out of the pool
  std::uint64_t give_back(std::vector<Piece> segments, std::uint64_t generation);
  void refused(const Piece& piece, std::uint64_t generation) noexcept;

  template <class Visit>
  void for_each_arena(Visit visit) {
    for (auto& slot : arenas_) {
      if (Arena* arena = slot.load(std::memory_order_acquire)) {
        std::lock_guard lock(arena->mutex);
        visit(*arena);
      }
    }
  }
  bool anything_unclean();

  // Read on every call, written seldom.
  Shared& shared_;
  const CUcontext handle_;
  const CUdevice device_;
  const std::uint64_t device_bytes_;
  const std::uint64_t largest_request_;  // bytes: a larger one is hopeless
  const bool primary_;
  const std::uint64_t magazine_limit_;   // bytes
  const std::uint64_t superblock_size_;  // bytes
  const std::uint64_t guard_bytes_;
  const bool fills_;    // something is to be done to new blocks
  const bool watches_;  // and to freed ones
  std::atomic<bool> alive_{true};
  std::atomic<int> closing_{0};
  std::atomic<int> broken_{0};
  // Growth was refused: cudaFreeAsync records its event inside itself (contract §3).
  std::atomic<bool> pressure_{false};
  std::atomic<std::uint64_t> idle_due_{0};  // when release_idle() looks again; relaxed: who sets it is who looks
  // By Arena::index; made when first needed, under the context's lock, and never destroyed.
  std::array<std::atomic<Arena*>, Lane::kArenas> arenas_{};

  std::vector<std::unique_ptr<Lane>> host_;  // kHostLanes of them
  FenceSet fences_;
  EventPool events_;
  std::unique_ptr<Gauges> own_gauges_;  // where the control page has no more room
  Gauges& gauges_;
  std::array<std::atomic<CUstream>, 3> own_streams_{};
  AsyncAllocator async_;
  Vmm vmm_;
  Guard guard_;
  Quarantine quarantine_;
  std::atomic<LaneNode*> all_lanes_{nullptr};
  std::atomic<bool> untidy_{false};  // there are many lanes: the next poll looks which are of use

  std::mutex mutex_;                                // protects everything below, and which lanes there are
  std::unordered_map<std::uint64_t, Lane*> lanes_;  // by stream id
  std::vector<Lane*> spare_lanes_;
  std::size_t tidy_at_ = 64;  // so many lanes: time to see which are of use
  unsigned lane_count_ = 0;   // of streams, spare ones too
  // A byte of device memory that native_wait() frees, held beforehand: a full device must still be able to free.
  CUdeviceptr spare_ = 0;
  int spare_users_ = 0;         // waiters that are freeing one and will bring one back
  std::uint64_t promised_ = 0;  // bytes being asked of the driver just now
  int growing_ = 0;             // threads asking
  bool initial_done_ = false;
  // What the driver would not take back, and is asked to again. It counts as held, and is not handed out: an error does
  // not say whose it is now.
  std::vector<Piece> refused_;
  std::vector<CUevent> farewells_;  // old drivers: recorded on streams when they were destroyed
};

}  // namespace cushion
