// Runtime: the process's one Cushion. It finds the context and stream that a call belongs to, keeps what the program's
// own calls tell about order, and counts what was passed to the driver. The shim's hooks call nothing else.
//
// Constant-initialised and never destroyed: hooks run in static constructors, in destructors and after main. No
// function throws. A function that answers "not mine" leaves the call to the driver.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/context.h"
#include "core/control_file.h"
#include "core/marks.h"
#include "core/patience.h"
#include "core/peak_map.h"
#include "core/report.h"
#include "core/shared.h"
#include "core/suppressions.h"
#include "core/timeline.h"
#include "core/whole_file.h"

namespace cushion {

// An allocation in memory of the driver's, while the program holds it: one that was passed on, or one that the async
// allocator served.
struct ForeignBlock {
  std::uint64_t size = 0;
  Note note;
  CUcontext context = nullptr;
  int device = 0;
  Api api = Api::malloc;
  std::uint32_t stream = 0;   // low half of its id; 0: host-ordered
  Context* server = nullptr;  // in whose async allocator it is; null: passed on
  std::uint64_t serial = 0;   // of a served one, whose address may be another's by the time that its free returns
  CUdeviceptr base = 0;       // of a served one: what the driver knows it by (async.h)
  bool freeing = false;       // its free is under way; a second one is an error
};

// What a thread knows of a stream's handle, until a stream or context goes (Shared::handle_epoch).
struct StreamCache {
  StreamIdentity identity;
  CUcontext current;  // for handles 0, 1 and 2, which mean another stream in each context
  Context* context;
  std::uint64_t epoch;
  bool named;  // the handle says it all, whatever context is current
};

class Runtime {
 public:
  constexpr Runtime() = default;

  // Reads the options. False: they are bad (told on stderr), and the program runs on native CUDA. Called once, at the
  // first device allocation, by one thread; shared().driver is bound by then.
  // `loaded`: when the process loaded us.
  bool start(const char* const* environment, const char* program, const LoadTime& loaded) noexcept;

  Shared& shared() noexcept { return shared_; }
  const Options& options() const noexcept { return *shared_.options; }

  // ---- allocation and free. out is written only on success.
  // False: the call is the driver's.
  bool malloc(CUdeviceptr* out, std::size_t bytes, Api api) noexcept;
  bool malloc_async(CUdeviceptr* out, std::size_t bytes, CUstream stream) noexcept;
  // What the native free would answer for a pointer into one of our segments, or to a block of the async allocator;
  // nothing for any other pointer.
  std::optional<CUresult> free(CUdeviceptr address) noexcept;
  std::optional<CUresult> free_async(CUdeviceptr address, CUstream stream) noexcept;
  // Whether the pointer lies in one of our segments or is a block of the async allocator's.
  bool owns(CUdeviceptr address) noexcept;
  // What a block of cudaMalloc's answers natively. The driver's own answer is another: the range of the segment that
  // the block lies in, or of its mapping or reservation, and of mapped memory (vmm.h) and of its pool's no context.
  // `range_start`: where the driver says that the pointer's range begins. Takes the arena's lock; within a block, up to
  // a load for each 64 KiB before the pointer.
  struct NativeBlock {
    CUcontext context;
    CUdeviceptr base;
    std::size_t bytes;  // as requested
    Api api;            // that it was allocated by
  };
  std::optional<NativeBlock> native_block(CUdeviceptr address, CUdeviceptr range_start) noexcept;

  // ---- what went to the driver
  void forwarded(Api api) noexcept { count(shared_.counters.forwarded[static_cast<int>(api)]); }
  void forwarded_block(Api api, CUdeviceptr address, std::size_t bytes, CUstream stream, bool stream_ordered) noexcept;
  // Around the real free of a pointer that is not ours: the record leaves before the driver can hand the address out
  // again, and comes back if the free fails.
  std::optional<ForeignBlock> forget_foreign(CUdeviceptr address) noexcept;
  void restore_foreign(CUdeviceptr address, const ForeignBlock& block) noexcept;
  void foreign_freed(CUdeviceptr address, const ForeignBlock& block) noexcept { left(block.note, address, block.size); }
  // A forwarded call for `bytes` (0: unknown) answered out of memory: gives back what is cached in any context, waiting
  // at most OOM_WAIT for it. True if memory went back and it is worth asking again.
  // ASK_OTHERS=on: else other processes are asked to.
  bool relieve(std::size_t bytes) noexcept;
  // Gives back what is cached and nothing uses, without a wait. The bytes that were held and are no more.
  std::uint64_t trim() noexcept;
  // What the helper thread does: it answers requests and gives idle memory back. Not while a context ends: whoever ends
  // one holds no_background() meanwhile; and no more after end_background(), as the process ends.
  void in_background() noexcept;
  std::unique_lock<std::mutex> no_background() noexcept { return std::unique_lock(background_); }
  void end_background() noexcept;
  // What a call that the driver serves may use of the current device under LIMIT: `bytes`, or none. Until the call's
  // block is recorded.
  Limit::Claim claim(Api api, std::uint64_t bytes, CUstream stream) noexcept;
  // Bytes that cuMemGetInfo of the current context should add to the driver's answer.
  std::uint64_t unused_in_current() noexcept;
  // Bytes of the current device that LIMIT counts and the program uses; `unused` are those of unused_in_current().
  std::uint64_t used_in_current(std::uint64_t unused) noexcept;

  // ---- order
  struct Mark {  // a stream's place when an event was recorded on it; no context: there is nothing to know
    Context* context = nullptr;
    Context::Position position;
    std::uint64_t version = 0;
    bool alone = false;
  };
  Mark before_record(CUevent event, CUstream stream) noexcept;
  void after_record(CUevent event, Mark mark, bool success) noexcept;
  Mark before_wait(CUevent event) noexcept;
  void after_wait(CUevent event, CUstream stream, const Mark& mark) noexcept;
  void forget_event(CUevent event) noexcept;
  // Before a call after which a free could be told from a native one (single_order.h); `why` names it.
  void end_order(const char* why) noexcept { shared_.order.end(shared_.driver, why); }
  void stream_created(CUstream stream, unsigned flags) noexcept;
  void stream_going(CUstream stream) noexcept;

  struct SyncMark {
    Context* context = nullptr;
    std::uint64_t stamp = 0;
    std::uint64_t generation = 0;
  };
  SyncMark before_synchronize(CUcontext context) noexcept;  // null: the current one
  void after_synchronize(const SyncMark& mark) noexcept;

  // ---- contexts
  void context_created(CUcontext context) noexcept;
  void failed(CUresult result) noexcept;  // a call of the program's, in the current context: notes a sticky error
  Context* find_context(CUcontext handle) noexcept;  // null if Cushion holds nothing there
  Context* find_primary(CUdevice device) noexcept;
  void ended(CUcontext handle) noexcept;  // the real call has ended it
  // The current context may use the peer's memory, or may no more. Before start() it is only noted.
  void peer_enabled(CUcontext peer, bool started) noexcept;
  void peer_disabled(CUcontext peer, bool started) noexcept;
  void pool_changed(CUdevice device) noexcept {
    native_async_[index_of(device)].store(true, std::memory_order_relaxed);
  }
  void every_pool_changed() noexcept;

  static constexpr std::uint64_t kMetricsAge = 5'000'000'000;  // ns: how old CUSHION_METRICS may get

  // ---- while the program runs (attention.cpp)
  // What is asked for is done: called by an allocation where shared().wants_attention(), and by the helper thread.
  [[gnu::noinline]] void attend() noexcept;
  void set_track(Tracking wanted) noexcept;
  // The same before start(), and not beside it: then the environment does not decide.
  void choose_track(Tracking wanted) noexcept {
    set_track(wanted);
    chosen_ = true;
  }
  void toggle_track() noexcept;               // at the next allocation; safe in a signal handler
  bool mark(std::string_view name) noexcept;  // false: there are too many already
  int report_now(const char* path) noexcept;  // null: as text to stderr. 0, or an errno
  const Marks& marks() const noexcept { return marks_; }
  const TimeLine& timeline() const noexcept { return timeline_; }
  PeakMap& peak_map() noexcept { return peak_map_; }
  std::uint64_t track_switches() const noexcept { return switches_.load(std::memory_order_relaxed); }
  void forked() noexcept { control_file_.detach(); }  // in the child

  // ---- the end
  // Writes the report if one is wanted and none was written, and removes the control page. `how` is what a person reads
  // ("exit", "signal 11"). Allocates nothing, and leaves out what a lock protects that it cannot get: this thread may
  // hold it.
  void report(const char* how, Patience patience) noexcept;
  // Then: what the process should exit with, which would with `status` (CUSHION_LEAK_EXIT_CODE).
  int exit_code(int status) noexcept;

  // The program is about to be told that there is no memory: said once, with who has it, if allocations are tracked or
  // warnings logged; and a first report is written, beside the one at the end.
  void out_of_memory(std::uint64_t bytes, Api api) noexcept;

  template <class Visit>
  bool for_each_foreign(Patience patience, Visit visit) noexcept {
    std::unique_lock lock(foreign_mutex_, std::defer_lock);
    if (!lock_within(lock, patience)) return false;
    for (const auto& [address, block] : *foreign_) visit(address, block);
    return true;
  }

  // What the report says of the program; set by start().
  struct Program {
    std::string name;
    std::string command;
    std::string host;
    long pid = 0;
    LoadTime loaded;
    std::string rank;  // empty: unknown
    std::vector<std::pair<std::string, std::string>> options;
    PathWords words;  // of path patterns
    ClaimedFile report;
    std::string metrics;  // path; empty: none
    Suppressions suppressions;
  };
  const Program& program() const noexcept { return *program_; }

 private:
  static std::size_t index_of(CUdevice device) noexcept { return static_cast<std::size_t>(device) % kDevices; }

  Context* context_of(CUcontext handle) noexcept;  // makes it if it can be served; null if not
  Context* current_context() noexcept;
  bool make_context(CUcontext handle, Context*& out) noexcept;
  void look_at_order(CUdevice device, bool another) noexcept;
  void name_device(CUdevice device) noexcept;  // with contexts_mutex_ held
  // The driver's error for a bad stream; success and a null context for a stream of a context that is not served.
  // `identity` is this thread's, good until it identifies another stream.
  CUresult identify(CUstream stream, const StreamIdentity*& identity, Context*& context) noexcept;
  CUresult identify_anew(CUstream stream, const StreamIdentity*& identity, Context*& context) noexcept;
  CUresult ask_identity(StreamCache& cache) noexcept;

  // The async allocator's blocks. An allocation of them is false where it is the driver's call; a free is nothing where
  // the pointer is no such block.
  bool serve_from_driver_pool(Context& context, CUdeviceptr* out, std::size_t bytes, Api api) noexcept;
  template <class Free>
  std::optional<CUresult> free_to_driver_pool(CUdeviceptr address, Free free) noexcept;
  // cuMemFree of what cuMemAllocAsync gave the program, where the async allocator sees to it (async.h).
  std::optional<CUresult> free_stream_ordered(CUdeviceptr address) noexcept;

  bool serve(Context& context, const Request& request, CUdeviceptr* out) noexcept;
  // What is noted of an allocation about to be made, as the level says.
  Note note(std::uint64_t bytes) noexcept { return shared_.tracks() ? note_now(bytes) : Note{}; }
  Note note_now(std::uint64_t bytes) noexcept;
  [[gnu::noinline]] void add_to_timeline(std::uint64_t ns) noexcept;
  // Bytes that the program has, and that are held from the driver for it; all devices.
  void use(std::uint64_t& live, std::uint64_t& held) noexcept;
  // A block whose note has a stack came, and left.
  void came(const Note& note, CUdeviceptr address, std::uint64_t bytes) noexcept {
    if (note.stack != 0) [[unlikely]]
      shared_.stacks.allocated(note.stack, address, bytes);
  }
  void left(const Note& note, CUdeviceptr address, std::uint64_t bytes) noexcept {
    if (note.stack != 0) [[unlikely]]
      shared_.stacks.freed(note.stack, address, bytes, monotonic_ns() - note.time);
  }

  void release_idle() noexcept;
  void context_of_stream(CUstream stream, CUcontext& context) noexcept;
  bool relieve_here(std::size_t bytes) noexcept;
  bool relieve_elsewhere(std::size_t bytes) noexcept;

  // These want foreign_mutex_.
  void add_foreign(CUdeviceptr address, const ForeignBlock& block);
  void uncount(const ForeignBlock& block) noexcept;
  Gauge& foreign_bytes(const ForeignBlock& block) noexcept {
    const int device = static_cast<int>(index_of(block.device));
    return block.server != nullptr ? shared_.from_driver_pool(device) : shared_.forwarded(device);
  }

  Tracking tracking_when_on() const noexcept;
  void begin_tracking() noexcept;
  void count_towards_start() noexcept;
  void answer(ControlPage& page) noexcept;
  void fulfil(ControlPage& page, const std::string& text) noexcept;
  void publish(ControlPage& page) noexcept;
  void refresh_metrics() noexcept;  // with attend_mutex_ held

  Shared shared_;
  ControlFile control_file_;
  std::mutex attend_mutex_;                     // whoever answers requests; tried only
  std::uint64_t metrics_due_ = 0;               // on the monotonic clock; under attend_mutex_
  std::atomic<unsigned> toggles_{0};            // signals not answered yet, modulo 2; relaxed: kAttention shows it
  std::atomic<std::uint64_t> calls_before_{0};  // allocation calls counted towards TRACK_AFTER; orders nothing
  std::atomic<std::uint64_t> switches_{0};      // of the level; orders nothing
  bool chosen_ = false;                         // by the program, before start()
  Marks marks_;
  TimeLine timeline_;
  PeakMap peak_map_;
  Program* program_ = nullptr;
  std::atomic<bool> reported_{false};
  std::atomic<bool> said_out_of_memory_{false};
  std::atomic<bool> asking_{false};  // a thread is asking other processes; who else would ask goes without

  // The helper holds it across driver calls, so that no context ends under them; taken before all other locks.
  std::mutex background_;
  std::atomic<bool> background_over_{false};

  std::mutex contexts_mutex_;         // protects adding to shared_.contexts and created_
  std::vector<CUcontext> created_;    // by cuCtxCreate: with the primary ones, the contexts that can be served
  std::vector<CUcontext> accessors_;  // had peer access enabled before start()
  struct Admission {                  // one context may use another's memory; Cushion may not know the owner yet
    CUcontext owner;
    CUcontext accessor;
    CUdevice device;  // the accessor's
  };
  std::vector<Admission> admitted_;  // under contexts_mutex_

  // cudaMallocAsync on these devices goes to the driver: the program manages its pools (contract §3).
  std::array<std::atomic<bool>, kDevices> native_async_{};

  std::mutex events_mutex_;      // protects events_; a leaf
  struct Known {                 // of an event
    Context* context = nullptr;  // null while it is being recorded
    Context::Position position;
    std::uint64_t version = 0;  // of its records
    int recording = 0;          // records under way
  };
  std::unordered_map<CUevent, Known>* events_ = nullptr;
  std::atomic<int> event_count_{0};  // events_'s size, readable without the lock

  std::mutex foreign_mutex_;  // protects *foreign_ and the page's gauges of devices; a leaf
  std::uint64_t foreign_serial_ = 0;
  std::unordered_map<CUdeviceptr, ForeignBlock>* foreign_ = nullptr;  // made by start()
};

// The process's runtime. shared().gate and the flags work from the start, the rest once start() has returned true.
Runtime& runtime() noexcept;

}  // namespace cushion
