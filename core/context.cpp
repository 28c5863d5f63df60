#include "core/context.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/log.h"
#include "core/mutation.h"
#include "core/thread.h"

namespace cushion {
namespace {

constexpr unsigned kReadyLanes = 8;
constexpr std::size_t kMostEvented = 1024;
constexpr std::uint64_t kGrowthShare = 32;
constexpr std::uint64_t kGrowthNeeds = 8;

// Serials of lanes, unique in the process.
constinit std::atomic<std::uint64_t> g_lane_serial{0};
std::uint64_t next_serial() noexcept { return g_lane_serial.fetch_add(1, std::memory_order_relaxed) + 1; }

// Which host lane a thread uses: dealt out in turn, so that up to kHostLanes threads have one each.
constinit std::atomic<unsigned> g_threads{0};
constinit thread_local unsigned t_turn = 0;  // from 1
unsigned host_lane() noexcept {
  if (t_turn == 0) t_turn = g_threads.fetch_add(1, std::memory_order_relaxed) + 1;
  return (t_turn - 1) % Context::kHostLanes;
}

// The lane that this thread counted in last. Its tally goes to the gauges when the thread turns to another: then a
// program of one thread has exact peaks.
constinit thread_local Lane* t_last_lane = nullptr;
[[gnu::noinline]] void settle_last(Lane& lane) noexcept {
  if (t_last_lane != nullptr) {
    t_last_lane->enter();
    t_last_lane->tally.settle();
    t_last_lane->leave();
  }
  t_last_lane = &lane;
}
inline void turn_to(Lane& lane) noexcept {
  if (t_last_lane != &lane) [[unlikely]]
    settle_last(lane);
}

// A block that is being freed, if its call stack is known: told once the lane's lock is given back.
struct Leaving {
  explicit Leaving(const Block& block) noexcept : stack(block.stack.acquire()) {
    if (stack == 0) [[likely]]
      return;
    address = block.address();
    bytes = block.live.requested;
    time = block.live.time;
  }
  void tell(Shared& shared) const noexcept {
    if (stack != 0) [[unlikely]]
      tell_now(shared);
  }
  [[gnu::noinline]] void tell_now(Shared& shared) const noexcept {
    shared.stacks.freed(stack, address, bytes, monotonic_ns() - time);
    if (shared.page->level() == TrackLevel::stacks)
      shared.misuse.remember({address, bytes, stack, shared.stacks.take(0)});
  }

  std::uint32_t stack;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;
};

// Errors that say "not while a capture is open": the call touched nothing else.
bool is_capture_error(CUresult r) noexcept {
  return r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && r <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

// The wrong fence (contract §3), for a mutation.
CUresult record_legacy(const Driver& driver, CUcontext context, CUevent event) noexcept {
  CurrentContext current(driver, context);
  return driver.cuEventRecord(event, stream_handle(kLegacyStream));
}

}  // namespace

Context::Context(Shared& shared, CUcontext handle, CUdevice device, std::uint64_t device_bytes, bool primary)
    : shared_(shared),
      handle_(handle),
      device_(device),
      device_bytes_(device_bytes),
      largest_request_(std::min(device_bytes, shared.options->limit.of(device_bytes))),
      primary_(primary),
      magazine_limit_(shared.options->magazine_size.of(device_bytes)),
      superblock_size_(shared.options->superblock_size.of(device_bytes)),
      guard_bytes_(std::min(shared.options->guard.of(device_bytes), Guard::kMost)),
      fills_(shared.options->init != InitMode::none || guard_bytes_ != 0),
      watches_(shared.options->watches()),
      gauges_([&]() -> Gauges& {
        if (Gauges* shown = shared.page->add_context(device)) return *shown;
        own_gauges_ = std::make_unique<Gauges>();
        return *own_gauges_;
      }()),
      async_(shared, *this),
      vmm_(shared, *this, gauges_.held),
      guard_(shared, *this, guard_bytes_),
      quarantine_(shared, *this) {
  arenas_[0].store(new Arena(shared.map, *this, 0), std::memory_order_release);
  for (unsigned i = 0; i < kHostLanes; ++i) {
    host_.push_back(std::make_unique<Lane>(i, gauges_));
    host_[i]->open(next_serial(), nullptr);
  }
  // The first streams find what they need made: a program's first parallel step is not to wait for host memory.
  for (unsigned i = 0; i < kReadyLanes; ++i) {
    spare_lanes_.push_back(make_lane());
    if (options().allocator == AllocatorKind::arena) make_arena(arena_of_lane(*spare_lanes_.back()));
  }
}

bool Context::note(CUresult result) noexcept {
  if (is_sticky(result)) broken_.store(static_cast<int>(result), std::memory_order_relaxed);
  return result == CUDA_SUCCESS;
}

bool Context::context_fences() const noexcept {
  return driver().cuCtxRecordEvent != nullptr && !shared_.green_contexts.load(std::memory_order_relaxed);
}

void Context::settle() noexcept {
  const auto tell = [](Lane& lane) {
    lane.enter();
    lane.tally.settle();
    lane.leave();
  };
  for (const auto& lane : host_) tell(*lane);
  for (LaneNode* node = all_lanes_.load(std::memory_order_acquire); node != nullptr; node = node->next)
    tell(node->lane);
}

Usage Context::usage() const noexcept {
  const auto level = [&](const Gauge& gauge, Tally::Bytes Tally::*bytes) {
    std::int64_t now = 0;
    std::int64_t high = 0;
    for_each_tally([&](const Tally& tally) {
      now += static_cast<std::int64_t>((tally.*bytes).delta.load(std::memory_order_relaxed));
      high += static_cast<std::int64_t>((tally.*bytes).high.load(std::memory_order_relaxed));
    });
    const auto current = static_cast<std::int64_t>(gauge.current());
    return Level(static_cast<std::uint64_t>(std::max(current + now, std::int64_t{0})),
                 std::max(gauge.peak(), static_cast<std::uint64_t>(std::max(current + high, std::int64_t{0}))));
  };
  return {level(gauges_.requested, &Tally::requested), level(gauges_.handed_out, &Tally::handed_out),
          Level(gauges_.held.current(), gauges_.held.peak())};
}

// ---- lanes -------------------------------------------------------------------------------------------------------

inline LaneRef Context::lane_of(const StreamIdentity* stream) noexcept {
  if (stream != nullptr) return stream->lane;
  Lane& lane = *host_[host_lane()];
  return {&lane, lane.serial()};
}

Lane* Context::make_lane() {
  spare_lanes_.reserve(lane_count_ + 1);  // so that ending a lane never allocates
  auto* node = new LaneNode{{kHostLanes + lane_count_, gauges_}, all_lanes_.load(std::memory_order_relaxed)};
  ++lane_count_;
  all_lanes_.store(node, std::memory_order_release);
  return &node->lane;
}

LaneRef Context::find_or_make_lane(const StreamIdentity& stream) {
  auto found = lanes_.find(stream.id);
  if (found == lanes_.end()) {
    if (spare_lanes_.empty()) spare_lanes_.push_back(make_lane());
    found = lanes_.emplace(stream.id, spare_lanes_.back()).first;
    spare_lanes_.pop_back();
    found->second->open(next_serial(), &stream);
    shared_.stream_lanes.fetch_add(1, std::memory_order_relaxed);
    untidy_.store(lanes_.size() >= tidy_at_, std::memory_order_relaxed);
  }
  stream.lane = {found->second, found->second->serial()};
  return stream.lane;
}

inline LaneRef Context::enter_lane(const StreamIdentity* stream) {
  LaneRef lane = lane_of(stream);
  if (lane.lane != nullptr && lane.lane->enter(lane.serial)) [[likely]]
    return lane;
  return enter_lane_anew(stream);
}

LaneRef Context::enter_lane_anew(const StreamIdentity* stream) {
  LaneRef lane = lane_of(stream);
  while (lane.lane == nullptr || !lane.lane->enter(lane.serial)) {
    std::lock_guard lock(mutex_);  // a reset that is under way ends first
    lane = stream != nullptr ? find_or_make_lane(*stream) : lane_of(nullptr);
  }
  return lane;
}

void Context::end_lane(Lane& lane) noexcept {
  // First nothing more comes in; then what is in goes where the whole context's fences order it, which cover a
  // destroyed stream's work too.
  lane.enter();
  lane.end();
  lane.leave();
  drain(lane);
  for_each_arena([&](Arena& arena) { arena.forget(lane); });
  lanes_.erase(lane.identity().id);
  spare_lanes_.push_back(&lane);
  shared_.stream_lanes.fetch_sub(1, std::memory_order_relaxed);
}

// A lane whose blocks are all clean or handed out, and that knows no order that still matters, can be made again when
// it is needed.
void Context::tidy_lanes() {
  std::lock_guard lock(mutex_);
  if (lanes_.size() < tidy_at_) return;
  const std::uint64_t through = fences_.clean_through();
  std::vector<Lane*> idle;
  for (const auto& known : lanes_) {
    Lane* lane = known.second;
    bool useful = lane->queries != 0;
    for_each_arena([&](Arena& arena) {
      const Heap* heap = lane->heaps[static_cast<std::size_t>(arena.index())];
      useful = useful || (heap != nullptr && !heap->bins.empty());
    });
    lane->enter();
    useful =
        useful || !lane->magazine.empty() ||
        std::any_of(lane->before.begin(), lane->before.end(), [&](const Lane::Before& b) { return b.stamp > through; });
    lane->leave();
    if (!useful) idle.push_back(lane);
  }
  for (Lane* lane : idle) end_lane(*lane);
  tidy_at_ = std::max<std::size_t>(64, 2 * lanes_.size());
  untidy_.store(false, std::memory_order_relaxed);
}

// ---- allocation --------------------------------------------------------------------------------------------------

// Rounded up to what it is cached by, if it is cached.
inline Need Context::need_of(std::uint64_t bytes) const noexcept {
  if (options().allocator == AllocatorKind::binning && bytes <= options().bin_max.bytes)
    bytes = std::bit_ceil(std::max(bytes, options().bin_min.bytes));
  const std::uint64_t alignment = bytes > kBigRequest ? kBigAlignment : kUnit;
  const std::uint64_t size = round_up(bytes, alignment);
  const std::uint64_t cached = Bins::round_up_to_bin(size);
  return {Magazine::caches(cached) && cached <= magazine_limit_ ? cached : size, alignment};
}

Need Context::superblock_for(const Need& need) const noexcept {
  return {round_up(std::max(superblock_size_, 2 * need.size), AddressMap::kPage), AddressMap::kPage};
}

// The choice that CUSHION_ALLOCATOR names: pool, one arena; arena, one for each stream and host lane; binning, one for
// each bin.
Arena& Context::arena_of(const Need& need, LaneRef by) {
  unsigned index = 0;
  switch (options().allocator) {
    case AllocatorKind::arena:
      if (need.size <= superblock_size_ / 2) index = arena_of_lane(*by.lane);
      break;
    case AllocatorKind::binning:
      if (need.size <= options().bin_max.bytes) index = 1 + static_cast<unsigned>(std::countr_zero(need.size));
      break;
    default:
      break;
  }
  Arena* arena = arenas_[index].load(std::memory_order_acquire);
  if (arena != nullptr) return *arena;
  std::lock_guard lock(mutex_);
  return make_arena(index);
}

Arena& Context::make_arena(unsigned index) {
  Arena* arena = arenas_[index].load(std::memory_order_relaxed);
  if (arena == nullptr) {
    arena = new Arena(shared_.map, *this, static_cast<int>(index));
    arena->pool.prepare(superblock_size_);
    arenas_[index].store(arena, std::memory_order_release);
  }
  return *arena;
}

inline bool Context::refuses(std::uint64_t bytes) const noexcept {
  return !serves() || bytes > largest_request_ ||
         // Without context fences nothing says when a peer's work is complete.
         (shared_.peers.load(std::memory_order_relaxed) && !context_fences());
}

inline Context::Grant Context::hand_out(Block& block, const Request& request) const noexcept {
  block.api = request.api;
  block.live.requested = request.bytes;
  block.live.stream = request.stream != nullptr ? static_cast<std::uint32_t>(request.stream->id) : 0;
  block.set(request.note);
  return {&block, block.address(), block.size};
}

bool Context::allocate(const Request& request, CUdeviceptr* out) noexcept try {
  if (refuses(request.bytes)) return false;
  const Need need = need_of(request.bytes + guard_bytes_);
  const LaneRef by = enter_lane(request.stream);
  Block* block = by.lane->magazine.take(need.size, takes_through(*by.lane));
  Grant grant;
  if (block != nullptr) [[likely]] {
    grant = hand_out(*block, request);
    block->set(BlockState::live);
    by.lane->tally.allocated(static_cast<int>(request.api), request.bytes, grant.size);
    if (request.note.time != 0) by.lane->tally.tracked(request.bytes);
  }
  by.lane->leave();
  turn_to(*by.lane);
  if (block == nullptr || fills_) [[unlikely]]
    return allocate_slowly(need, request, by, grant, out);
  *out = grant.address;
  return true;
} catch (...) {  // no host memory: the driver may still have what is needed
  return false;
}

// The rest of an allocation: `grant` is what the magazine gave, if it gave any.
bool Context::allocate_slowly(const Need& need, const Request& request, LaneRef by, Grant grant, CUdeviceptr* out) {
  if (!grant) {
    if (untidy_.load(std::memory_order_relaxed)) poll();
    Arena& arena = arena_of(need, by);
    grant = take(arena, need, request, by);
    if (!grant && options().idle_release.ns != 0) release_idle();
    if (!grant) grant = search(arena, need, request, by);
    if (!grant) return false;
    by.lane->enter();
    bump(by.lane->tally.misses);
    by.lane->tally.allocated(static_cast<int>(request.api), request.bytes, grant.size);
    if (request.note.time != 0) by.lane->tally.tracked(request.bytes);
    by.lane->leave();
  }
  if ((options().init != InitMode::none && !fill(grant.address, request)) ||
      (guard_bytes_ != 0 && !guard_.set(grant.address, request.bytes, request.stream))) {
    take_back(grant, request, by);
    return false;
  }
  *out = grant.address;
  return true;
}

// What it promised cannot be kept; the driver's memory is zero at least.
void Context::take_back(const Grant& grant, const Request& request, LaneRef by) {
  const Segment* segment = shared_.map.find(grant.address);
  if (segment == nullptr) return;  // a reset was faster
  const Found found = find(*segment, grant.address);
  if (found.block != grant.block || !found.block->change(found.address, BlockState::live, BlockState::freeing)) return;
  found.block->stack = 0;  // it never came
  give_now(found, request.stream, false);
  by.lane->enter();
  bump(by.lane->tally.served[static_cast<int>(request.api)], ~std::uint64_t{0});
  bump(by.lane->tally.frees, ~std::uint64_t{0});
  by.lane->leave();
}

Context::Grant Context::take(Arena& arena, const Need& need, const Request& request, LaneRef by) {
  {
    std::lock_guard lock(arena.mutex);
    if (Block* block = arena.take(need, by)) return hand_out(*block, request);
  }
  if (arena.index() == 0 || !refill(arena, need, by)) return {};
  std::lock_guard lock(arena.mutex);
  Block* block = arena.take(need, by);
  return block != nullptr ? hand_out(*block, request) : Grant{};
}

// With the context's lock held, so that no reset comes between the two arenas.
bool Context::refill(Arena& arena, const Need& need, LaneRef by) {
  std::lock_guard lock(mutex_);
  const Need whole = superblock_for(need);
  Block* superblock = nullptr;
  bool clean = false;
  {
    std::lock_guard inner(global().mutex);
    // Cached: it is in no program's hands, and a second free of its first byte must not claim it.
    superblock = global().take(whole, by, BlockState::cached);
    if (superblock == nullptr) return false;
    superblock->api = Api::superblock;
    clean = superblock->heap == global().clean->index;
  }
  const std::uint64_t stamp = fences_.now();
  {
    std::lock_guard inner(arena.mutex);
    if (arena.add_superblock(*superblock, clean, by, stamp)) return true;
  }
  std::lock_guard inner(global().mutex);  // the host is out of memory
  clean ? global().give_clean(superblock) : global().give(superblock, by, stamp);
  return false;
}

Context::Grant Context::search(Arena& arena, const Need& need, const Request& request, LaneRef by) {
  // What a host lane freed under `deferred` and keeps is in no arena: a fence is wanted for it too.
  poll(by.lane->is_stream() || options().free != FreeMode::deferred ? 0 : fences_.now());
  if (const Grant grant = take_again(arena, need, request, by)) return grant;
  if (collect()) {
    poll();
    collect();  // superblocks that have become whole
    if (const Grant grant = take_again(arena, need, request, by)) return grant;
  }
  // A superblock is worth growing for. If there can be none, the global arena serves the request itself.
  const bool own = arena.index() != 0;
  CUresult why = CUDA_SUCCESS;
  // Other threads may take what this one has asked the driver for: then once more, but not for ever.
  const auto grow_for = [&](const Need& growth, Arena& from, bool exact) {
    Grant found;
    for (int tries = 0; !found && tries < 16 && grow(growth, exact, why); ++tries)
      found = take(from, need, request, by);
    return found;
  };
  Grant grant = grow_for(own ? superblock_for(need) : need, arena, false);
  if (!grant && own) grant = take(global(), need, request, by);
  if (!grant && own) grant = grow_for(need, global(), false);
  if (!grant && quarantine_.on() && quarantine_.empty()) {
    poll();
    collect();
    grant = take_again(arena, need, request, by);
    if (!grant && own) grant = take(global(), need, request, by);
  }
  if (grant) return grant;

  // A wait on the legacy stream would hold every blocking stream back, and what they do may be what is waited for.
  const bool may_wait = by.lane->is_stream() && !(is_legacy(request.stream->handle) &&
                                                  shared_.blocking_streams.load(std::memory_order_relaxed));
  if (may_wait && (why == CUDA_ERROR_OUT_OF_MEMORY || !driver_has(need.size))) {
    grant = steal(arena, need, request, by);
    if (!grant && own) grant = steal(global(), need, request, by);
  }
  if (grant || why != CUDA_ERROR_OUT_OF_MEMORY) return grant;

  // Out of memory. Wait for freed blocks only where they could help, and never while a capture is open.
  std::uint64_t pool_free = 0;
  std::uint64_t held = 0;
  std::uint64_t hole = 0;
  for_each_arena([&](Arena& a) {
    pool_free += a.pool.free_bytes();
    if (a.index() == 0) held = a.pool.held();
    hole = std::max(hole, a.pool.fragments().largest);
  });
  if (need.size <= pool_free && anything_unclean() && !shared_.gate.may_be_open() && options().oom_wait.ns != 0) {
    count(shared_.counters.memory_waits);
    grant = wait_for_blocks(arena, need, request, by);
  }
  if (!grant && release_unused(0) != 0) grant = grow_for(need, global(), true);
  if (!grant) {
    count(shared_.counters.out_of_memory);
    log::warn("out of memory on device {}: {} bytes asked; the pool holds {} bytes, {} of them free, largest hole {}",
              device_, request.bytes, held, pool_free, hole);
  }
  return grant;
}

// After the fences were asked: the lane's own magazine first, which they may have cleaned.
Context::Grant Context::take_again(Arena& arena, const Need& need, const Request& request, LaneRef by) {
  if (by.lane->enter(by.serial)) {
    Grant grant;
    if (Block* block = by.lane->magazine.take(need.size, takes_through(*by.lane))) {
      grant = hand_out(*block, request);
      block->set(BlockState::live);
    }
    by.lane->leave();
    if (grant) return grant;
  }
  return take(arena, need, request, by);
}

// At MAX_SIZE: whether a request that is passed on will be served.
bool Context::driver_has(std::uint64_t bytes) noexcept {
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), handle_);
  std::size_t idle = 0;
  std::size_t total = 0;
  return !note(driver().call(driver().cuMemGetInfo_v2, &idle, &total)) || idle >= bytes;
}

bool Context::anything_unclean() {
  bool unclean = false;
  for_each_arena([&](Arena& arena) { unclean = unclean || arena.newest_unclean() != 0 || !arena.evented.empty(); });
  return unclean;
}

Context::Grant Context::wait_for_blocks(Arena& arena, const Need& need, const Request& request, LaneRef by) {
  const std::uint64_t start = ticks();
  const std::uint64_t deadline = monotonic_ns() + options().oom_wait.ns;
  auto pause = std::chrono::microseconds(20);
  Grant grant;
  while (!grant && monotonic_ns() < deadline && broken() == CUDA_SUCCESS) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
    poll();
    collect();
    grant = take(arena, need, request, by);
    if (!grant && arena.index() != 0) grant = take(global(), need, request, by);
    if (!grant && !anything_unclean()) break;  // nothing left to wait for
  }
  count(shared_.counters.wait_ticks, ticks() - start);
  return grant;
}

bool Context::has_clean(const Need& need) noexcept {
  std::lock_guard lock(global().mutex);
  return global().clean->bins.find(need.size, need.alignment, kAnyStamp) != nullptr;
}

// More memory for the global arena, enough for `need`. `why` is what the driver said; success and false: MAX_SIZE does
// not allow it.
bool Context::grow(const Need& need, bool exact, CUresult& why) {
  constexpr std::uint64_t kPage = AddressMap::kPage;
  const std::uint64_t least = round_up(need.size, kPage);
  std::uint64_t want = least;
  std::uint64_t promised = 0;  // new bytes, at most
  const std::uint64_t generation = events_.generation();
  {
    std::unique_lock lock(mutex_);
    // Under LIMIT a growth may be about to take all that there is for everybody: it is waited for.
    const std::uint64_t deadline = shared_.limit.on() ? monotonic_ns() + options().oom_wait.ns : 0;
    while (growing_ != 0 && deadline != 0 && monotonic_ns() < deadline) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    }
    if (shared_.limit.on() && has_clean(need)) return true;  // it brought what is wanted
    const std::uint64_t held = gauges_.held.current();
    const std::uint64_t most = options().max_size.of(device_bytes_);
    const std::uint64_t have = held + promised_;
    const std::uint64_t room = most > have ? (most - have) / kPage * kPage : 0;
    if (least > room && !vmm_.on()) {
      why = CUDA_SUCCESS;
      pressure_.store(true, std::memory_order_relaxed);
      return false;
    }
    if (!exact && growing_ == 0) {
      // A share of what is held: geometric, and at most that share too much. Segments of their own need more: large
      // requests, because a segment that holds a few of them only has an end that is of no use, but no more than
      // doubles what is held.
      std::uint64_t target = held / kGrowthShare;
      if (!vmm_.on()) target = std::max(target, std::min(kGrowthNeeds * need.size, held));
      target = std::min(target, options().growth_max.of(device_bytes_));
      if (!vmm_.on()) target = std::max(target, options().segment_size.of(device_bytes_));
      if (!initial_done_) target = std::max(target, options().initial_size.of(device_bytes_));
      want = std::max(least, std::min(round_up(target, kPage), room));
    }
    initial_done_ = true;
    // Of mapped memory a page more may lack, where the need begins within one.
    promised = vmm_.on() ? std::min(std::max(want, least + kPage), room) : want;
    promised_ += promised;
    ++growing_;
  }
  Limit::Claim claim = shared_.limit.claim(shared_, device_, promised, kPage, least);
  const bool limited = shared_.limit.on() && claim.bytes() < promised;
  const bool there = limited && claim.bytes() < least && has_clean(need);  // brought by whose claim was waited for
  CUdeviceptr address = 0;
  CUresult result = CUDA_SUCCESS;
  Vmm::Growth growth;
  {
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), handle_);
    result = current.result();
    if (limited && !vmm_.on()) {
      if (claim.bytes() < least) result = CUDA_ERROR_OUT_OF_MEMORY;
      want = std::min(want, std::max(least, claim.bytes()));
    }
    if (result == CUDA_SUCCESS && want > least) {  // speculative: leaves the rest of the device to others (contract §6)
      std::size_t idle = 0;
      std::size_t total = 0;
      const std::uint64_t reserve = std::max(device_bytes_ / 50, std::uint64_t{512} << 20);
      if (!note(driver().call(driver().cuMemGetInfo_v2, &idle, &total)) || idle < want + reserve) want = least;
    }
    if (result == CUDA_SUCCESS) {
      if (vmm_.on()) {
        growth = vmm_.extend(need, limited ? claim.bytes() : promised, want > least ? want : 0, generation);
        result = growth.result;
      } else {
        result = driver().call(driver().cuMemAlloc_v2, &address, static_cast<std::size_t>(want));
        if (result == CUDA_ERROR_OUT_OF_MEMORY && want > least) {
          want = least;
          result = driver().call(driver().cuMemAlloc_v2, &address, static_cast<std::size_t>(want));
        }
      }
    }
    note(result);
  }
  why = growth.limited && !limited ? CUDA_SUCCESS : result;
  bool added = false;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return false;  // reset meanwhile: what the address is now is not ours
    promised_ -= promised;
    --growing_;
    if (there) return true;
    // The reset may be over and its discard() to come: the address then may be one that the old memory still has here.
    if (closing_.load(std::memory_order_relaxed) != 0) return false;
    if (result != CUDA_SUCCESS) {
      if (result == CUDA_ERROR_OUT_OF_MEMORY) pressure_.store(true, std::memory_order_relaxed);
      return false;
    }
    std::lock_guard arena(global().mutex);
    added = vmm_.on() || (address % kPage == 0 && global().pool.add(address, want, *global().clean));
    if (added) {
      pressure_.store(false, std::memory_order_relaxed);
      if (address != 0) gauges_.held.add(want);
      if (address != 0 || growth.added != 0) count(shared_.counters.grows);
    }
  }
  claim.settle();
  if (added) {
    take_spare();
    log::debug("device {}: {} bytes more for {}", device_, address != 0 ? want : growth.added, need.size);
  } else {  // the host is out of memory
    RelaxedCaptureMode relaxed(driver());
    driver().call(driver().cuMemFree_v2, address);
  }
  return added;
}

Context::Grant Context::steal(Arena& arena, const Need& need, const Request& request, LaneRef by) {
  Arena::Evented chosen{};
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(arena.mutex);
    const auto usable = std::find_if(arena.evented.begin(), arena.evented.end(), [&](const Arena::Evented& e) {
      return e.serial != 0 && !e.being_queried && e.block->size >= need.size &&
             Bins::lead(*e.block, need.alignment) == 0;
    });
    if (usable == arena.evented.end()) return {};
    usable->being_queried = true;
    chosen = *usable;
    generation = arena.generation();
  }
  CUresult result = CUDA_SUCCESS;
  {
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), handle_);
    result = on_stream(request.stream->handle, [&](CUstream stream) {
      if (mutated(Mutation::steal_without_wait)) return CUDA_SUCCESS;
      return driver().call(driver().cuStreamWaitEvent, stream, chosen.event.event, 0u);
    });
  }
  std::lock_guard lock(arena.mutex);
  if (generation != arena.generation()) return {};
  const auto at = std::find_if(arena.evented.begin(), arena.evented.end(),
                               [&](const Arena::Evented& e) { return e.block == chosen.block; });
  if (!note(result)) {
    at->being_queried = false;
    return {};
  }
  arena.evented.erase(at);
  chosen.event.release();  // the wait took the event's state at the call: it may be recorded again
  count(shared_.counters.stream_waits);
  Heap* heap = arena.heap_of(by);
  arena.pool.take_evented(chosen.block);
  arena.pool.trim(chosen.block, need.size, *heap, fences_.now());
  return hand_out(*chosen.block, request);
}

bool Context::fill(std::uint64_t address, const Request& request) noexcept {
  const unsigned char value = fill_byte(options().init);
  const auto set = [&](CUstream stream) {
    return driver().call(driver().cuMemsetD8Async, address, value, static_cast<std::size_t>(request.bytes), stream);
  };
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), handle_);
  if (request.stream != nullptr) return note(on_stream(request.stream->handle, set));
  // cudaMalloc has no stream.
  CUstream stream = own_stream(Own::fill);
  return stream != nullptr && note(set(stream)) && note(driver().call(driver().cuStreamSynchronize, stream));
}

CUstream Context::own_stream(Own which) noexcept {
  std::atomic<CUstream>& slot = own_streams_[static_cast<std::size_t>(which)];
  CUstream stream = slot.load(std::memory_order_acquire);
  if (stream != nullptr) return stream;
  CUcontext current = nullptr;
  if (!note(driver().call(driver().cuCtxGetCurrent, &current)) || current != handle_ ||
      !note(driver().call(driver().cuStreamCreate, &stream, static_cast<unsigned>(CU_STREAM_NON_BLOCKING))))
    return nullptr;
  CUstream first = nullptr;
  if (slot.compare_exchange_strong(first, stream, std::memory_order_acq_rel)) return stream;
  driver().call(driver().cuStreamDestroy_v2, stream);  // another thread was first
  return first;
}

bool Context::read_back(std::uint64_t address, void* to, std::uint64_t bytes) noexcept {
  CUstream stream = own_stream(Own::look);
  return stream != nullptr &&
         note(driver().call(driver().cuMemcpyDtoHAsync_v2, to, CUdeviceptr{address}, static_cast<std::size_t>(bytes),
                            stream)) &&
         note(driver().call(driver().cuStreamSynchronize, stream));
}

// ---- free --------------------------------------------------------------------------------------------------------

// The free of a claimed block, counted in the lane that was entered for it, which is left. keep() is called while the
// lane is held. False: a reset meanwhile, and the block is gone.
template <class Keep>
[[gnu::always_inline]] inline bool Context::depart(const Found& freed, LaneRef by, Keep keep) {
  if (freed.generation != freed.arena->generation()) {
    by.lane->leave();
    return false;
  }
  Block& block = *freed.block;
  const Leaving leaving(block);
  // Once more, after the stack was read: what a reset has recycled meanwhile has a heap's number where its stack's was.
  if (leaving.stack != 0 && freed.generation != freed.arena->generation()) [[unlikely]] {
    by.lane->leave();
    return false;
  }
  by.lane->tally.freed(block.live.requested, block.size);
  block.set(BlockState::cached);  // and counted: if it is lost now, it is not counted as lost
  keep();
  by.lane->leave();
  leaving.tell(shared_);
  turn_to(*by.lane);
  return true;
}

// By right nobody has the block just now but the free; the order in which it will be reused is the one to look in.
bool Context::watch(const Found& freed, const StreamIdentity* stream, bool& clean) {
  if (freed.generation != freed.arena->generation()) return false;
  Block& block = *freed.block;
  Quarantine::Held held{freed.block, block.size, freed.arena, freed.generation, {}, {}};
  held.freed = {freed.address, block.live.requested, block.stack, 0};
  if (guard_bytes_ != 0) guard_.check(held.freed, stream, clean);
  if (!quarantine_.on()) return false;
  held.freed.freed = shared_.stacks.take(0);
  if (held.freed.allocated == 0 || shared_.page->level() != TrackLevel::stacks)  // else Leaving does it
    shared_.misuse.remember(held.freed);
  if (!quarantine_.holds(held.size)) return false;
  const Quarantine::Filled filled = quarantine_.fill(held, stream, clean);
  clean = clean && filled != Quarantine::Filled::unordered;
  if (filled == Quarantine::Filled::no || filled == Quarantine::Filled::unordered) return false;
  LaneRef by;
  try {
    by = enter_lane(stream);
  } catch (...) {  // no host memory; the program cannot have it back either, it was filled
    if (filled == Quarantine::Filled::yes) held.filled.release();
    return true;
  }
  if (!depart(freed, by, [] {})) {
    if (filled == Quarantine::Filled::yes) held.filled.release();
    return true;
  }
  if (filled == Quarantine::Filled::yes) quarantine_.add(held);
  return true;
}

// Before the driver may take the context's memory away.
void Context::last_look() noexcept {
  if (guard_bytes_ != 0) guard_.poll();
  if (quarantine_.on()) quarantine_.empty();
}

void Context::release(const Quarantine::Held& held) noexcept try {
  {
    std::lock_guard lock(held.arena->mutex);
    if (held.generation != held.arena->generation()) return;
    held.arena->give_pending(held.block, fences_.now());
  }
  if (held.arena->index() != 0) return_superblocks(*held.arena, superblock_size_);
} catch (...) {  // no host memory to give superblocks back with: they stay where they are
}

inline void Context::give(const Found& freed, const StreamIdentity* stream, bool clean) {
  if (watches_ && watch(freed, stream, clean)) [[unlikely]]
    return;
  give_now(freed, stream, clean);
}

inline void Context::give_now(const Found& freed, const StreamIdentity* stream, bool clean) {
  const LaneRef by = enter_lane(stream);
  std::uint64_t stamp = 0;
  Magazine::Given given{};
  const bool ours = depart(freed, by, [&] {
    if (!clean) stamp = fences_.now();
    given = by.lane->magazine.give(freed.block, stamp, magazine_limit_);
  });
  if (!ours) return;
  if (given != Magazine::Given::kept) give_to_arena(freed, by, stamp, given, stream == nullptr);
}

void Context::give_to_arena(const Found& freed, LaneRef by, std::uint64_t stamp, Magazine::Given given, bool is_host) {
  if (given != Magazine::Given::due) {
    freed.block->prefetch_neighbours();
    {
      std::lock_guard lock(freed.arena->mutex);
      if (freed.generation != freed.arena->generation()) return;
      stamp == 0 ? freed.arena->give_clean(freed.block) : freed.arena->give(freed.block, by, stamp);
    }
    if (freed.arena->index() != 0) return_superblocks(*freed.arena, superblock_size_);
    if (given == Magazine::Given::crowded) {
      std::lock_guard lock(mutex_);
      drain(*by.lane);
    }
  }
  // One fence cleans everything that a deferring host lane has collected.
  if (given != Magazine::Given::unwanted && is_host && stamp != 0) poll(stamp);
}

CUresult Context::free(const Found& found, bool exported) noexcept try {
  Block* block = found.block;
  const std::uint64_t address = found.address;
  if (!block->change(address, BlockState::live, BlockState::freeing)) return wrong_free(shared_, address, "cuMemFree");
  const bool fenced = context_fences();
  // Natively cudaFree of a stream-ordered block does not wait. Deferred frees need context fences to come back.
  const bool waits = block->api != Api::malloc_async;
  if (broken() == CUDA_SUCCESS && fenced && (!waits || (options().free == FreeMode::deferred && !exported))) {
    give(found, nullptr, mutated(Mutation::deferred_free_is_clean));
    return CUDA_SUCCESS;
  }
  if (options().free == FreeMode::automatic && waits && !exported && owes_wait()) {
    count(shared_.counters.free_waits_owed);
    give(found, nullptr, true);
    return CUDA_SUCCESS;
  }
  const std::uint64_t stamp = fences_.advance();
  // After the stamp: whoever made peers true before a free that the stamp covers is seen here.
  const bool peers = shared_.peers.load(std::memory_order_relaxed);
  std::uint64_t taken = 0;
  const CUresult result = broken() != CUDA_SUCCESS ? broken() : waits ? wait_for_context(taken) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) {
    block->change(address, BlockState::freeing, BlockState::live);
    return result;
  }
  shared_.count_wait(shared_.counters.free_waits, taken);
  if (taken > shared_.noticeable_wait) note_wait(taken);
  const bool unserved = peers && !fenced;  // nothing is handed out any more: memory goes where it goes natively
  const bool clean = waits && (unserved || !peers || becomes_idle(0));
  if (clean && !unserved) fences_.completed(stamp);
  const std::uint64_t generation = events_.generation();
  if (exported) shared_.ipc.withdraw(address);
  give(found, nullptr, clean);
  if (options().idle_release.ns != 0) release_idle();
  if (unserved && !shared_.gate.may_be_open()) {
    vmm_.on() ? release_unused(0) : give_back(detach_unused(0), generation);
  }
  return CUDA_SUCCESS;
} catch (...) {  // no host memory
  found.block->change(found.address, BlockState::freeing, BlockState::live);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult Context::wrong_free(Shared& shared, std::uint64_t address, const char* call) noexcept {
  count(shared.counters.wrong_frees);
  if (!shared.tells_misuse()) return CUDA_ERROR_INVALID_VALUE;
  FreedBlock around;
  // What it lies in may be an arena's superblock that goes back meanwhile: then nothing is said of a block.
  if (const Segment* segment = shared.map.find(address)) {
    Arena& arena = *segment->arena();
    std::lock_guard lock(arena.mutex);
    arena.pool.for_each_live([&](const Pool::LiveBlock& block) {
      if (address - block.address < block.size) around = {block.address, block.requested, block.note.stack, 0};
    });
  }
  const std::optional<FreedBlock> before = shared.misuse.recall(address);
  shared.misuse.wrong_free(shared.stacks, call, address, around.address != 0 ? &around : nullptr,
                           before ? &*before : nullptr);
  return CUDA_ERROR_INVALID_VALUE;
}

// The call stack costs little beside the wait.
void Context::note_wait(std::uint64_t taken) noexcept {
  count(shared_.counters.free_wait_ticks, taken);
  if (shared_.page->level() < TrackLevel::stacks) return;
  if (const std::uint32_t stack = shared_.stacks.take(0); stack != 0) shared_.stacks.waited(stack, taken);
}

bool Context::owes_wait() noexcept {
  if (!shared_.order.holds() || broken() != CUDA_SUCCESS || !context_fences()) return false;
  CurrentContext current(driver(), handle_);
  return shared_.order.owe(driver(), shared_.gate, handle_, events_);
}

CUresult Context::free_async(const Found& found, const StreamIdentity& stream, Context& stream_context) noexcept try {
  if (broken() != CUDA_SUCCESS) return broken();
  if (!found.block->change(found.address, BlockState::live, BlockState::freeing))
    return wrong_free(shared_, found.address, "cuMemFreeAsync");
  if (shared_.ipc.any()) [[unlikely]]
    shared_.ipc.withdraw(found.address);
  const bool own = &stream_context == this || mutated(Mutation::foreign_stream_is_own);
  // By the legacy stream's rule its free comes after the blocking streams' work, and their work after its next
  // allocation; but nothing is put on it that would tell them so, and an event would hold them back. And a free on a
  // blocking stream comes after the legacy stream's kernels, as does who synchronises the stream after its next
  // allocation. The whole context's order covers both.
  const bool orders_others =
      own && shared_.blocking_streams.load(std::memory_order_relaxed) &&
      (is_legacy(stream.handle) || (stream.blocking && shared_.legacy_launches.load(std::memory_order_relaxed)));
  if (!own || (pressure_.load(std::memory_order_relaxed) && !orders_others && !quarantine_.on()))
    return free_evented(found, stream, stream_context);
  give(found, orders_others ? nullptr : &stream, mutated(Mutation::async_free_is_clean));
  return CUDA_SUCCESS;
} catch (...) {  // no host memory
  found.block->change(found.address, BlockState::freeing, BlockState::live);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

// Freed under pressure, or on another context's stream: an event inside the free says when it is over.
CUresult Context::free_evented(const Found& found, const StreamIdentity& stream, Context& stream_context) {
  const bool foreign = &stream_context != this;
  Arena& arena = *found.arena;
  if (guard_bytes_ != 0) {
    const FreedBlock block{found.address, found.block->live.requested, found.block->stack, 0};
    foreign ? guard_.skip(found.address) : guard_.check(block, &stream, false);
  }
  bool room = false;
  {
    std::lock_guard lock(arena.mutex);
    arena.evented.reserve(kMostEvented);
    room = arena.evented.size() < kMostEvented;
  }
  FenceEvent event{&stream_context.events_, stream_context.events_.generation(), nullptr};
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  if (room || foreign) {
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), stream_context.handle_);
    event.event = event.pool->take(driver(), stream_context.handle_);
    if (event.event != nullptr) {
      result =
          on_stream(stream.handle, [&](CUstream s) { return driver().call(driver().cuEventRecord, event.event, s); });
    }
  }
  if (is_sticky(result)) {
    stream_context.note(result);
    found.block->change(found.address, BlockState::freeing, BlockState::live);
    return result;
  }
  if (result == CUDA_SUCCESS) {
    const LaneRef by = enter_lane(foreign ? nullptr : &stream);
    std::uint64_t stamp = 0;
    const bool ours = depart(found, by, [&] {
      if (!foreign) stamp = fences_.now();
    });
    if (!ours) return CUDA_SUCCESS;
    std::lock_guard lock(arena.mutex);
    if (found.generation != arena.generation()) return CUDA_SUCCESS;
    if (arena.evented.size() < arena.evented.capacity()) {
      if (mutated(Mutation::evented_free_is_clean)) {
        event.release();
        arena.give_clean(found.block);
        return CUDA_SUCCESS;
      }
      arena.pool.give_evented(found.block, *arena.pending, stamp);
      arena.evented.push_back({found.block, event, foreign ? 0 : by.serial, false});
      return CUDA_SUCCESS;
    }
    // Others were faster.
    event.release();
    if (foreign) shared_.peers.store(true, std::memory_order_relaxed);
    foreign ? arena.give_pending(found.block, fences_.now()) : arena.give(found.block, by, stamp);
    return CUDA_SUCCESS;
  }
  if (event.event != nullptr) event.release();
  // No event can say it. The stream's own order still can; another context's work is covered by fences over all of
  // them.
  if (foreign) shared_.peers.store(true, std::memory_order_relaxed);
  give(found, foreign ? nullptr : &stream, false);
  return CUDA_SUCCESS;
}

// ---- giving back what lies in magazines and superblocks ----------------------------------------------------------

void Context::give_cached(Block* stack, LaneRef by) noexcept {
  while (stack != nullptr) {
    Block* block = stack;
    stack = Magazine::next_of(*block);
    const std::uint64_t stamp = Magazine::stamp_of(*block);
    Arena& arena = *shared_.map.find(block->address())->arena();  // a cached block keeps its segment here
    std::lock_guard lock(arena.mutex);
    stamp == 0 || mutated(Mutation::drained_magazine_is_clean) ? arena.give_clean(block) : arena.give(block, by, stamp);
  }
}

bool Context::drain(Lane& lane) noexcept {
  unsigned at = 0;
  for (bool any = false;; any = true) {
    lane.enter();
    const LaneRef by{&lane, lane.serial()};
    Block* stack = lane.magazine.drain(at);
    lane.leave();
    if (stack == nullptr) return any;
    give_cached(stack, by);
  }
}

bool Context::collect() {
  bool any = false;
  {
    std::lock_guard lock(mutex_);
    for (const auto& lane : host_) any = drain(*lane) || any;
    for (const auto& [id, lane] : lanes_) any = drain(*lane) || any;
  }
  for (auto& slot : arenas_) {
    Arena* arena = slot.load(std::memory_order_acquire);
    if (arena != nullptr && arena->index() != 0) any = return_superblocks(*arena, 0) || any;
  }
  return any;
}

bool Context::return_superblocks(Arena& arena, std::uint64_t keep) {
  {
    std::lock_guard lock(arena.mutex);
    if (arena.pool.unused() <= keep) return false;
  }
  std::vector<Arena::Superblock> superblocks;
  std::lock_guard lock(mutex_);  // no reset comes between the two arenas
  {
    std::lock_guard inner(arena.mutex);
    arena.detach_superblocks(keep, superblocks);
  }
  std::lock_guard inner(global().mutex);
  for (const Arena::Superblock& s : superblocks) {
    Block* block = shared_.map.find(s.address)->block_at(s.address);
    s.order == Order::clean || mutated(Mutation::superblock_returns_clean) ? global().give_clean(block)
                                                                           : global().give(block, s.lane, s.stamp);
  }
  return !superblocks.empty();
}

// ---- fences ------------------------------------------------------------------------------------------------------

CUresult Context::wait_for_context(std::uint64_t& taken) {
  if (mutated(Mutation::free_does_not_wait)) return CUDA_SUCCESS;
  RelaxedCaptureMode relaxed(driver());
  if (!context_fences()) return native_wait(taken);
  FenceEvent fence{&events_, events_.generation(), events_.take(driver(), handle_)};
  if (fence.event == nullptr) return native_wait(taken);
  CUresult result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (shared_.gate.enter()) {
    // One reading of the clock for both calls: on an idle device they are most of what cudaFree costs.
    InsideDriver inside;
    const std::uint64_t start = ticks();
    result = mutated(Mutation::legacy_fence) ? record_legacy(driver(), handle_, fence.event)
                                             : driver().cuCtxRecordEvent(handle_, fence.event);
    shared_.gate.leave();
    // Not a query first: an idle device takes a moment to complete the event, and a query then costs more than it
    // saves.
    if (result == CUDA_SUCCESS) result = driver().cuEventSynchronize(fence.event);
    taken = ticks() - start;
    count(driver().calls, 2);
    count(driver().time, taken);
  }
  fence.release();
  if (is_capture_error(result)) return native_wait(taken);
  note(result);
  return result;
}

CUresult Context::native_wait(std::uint64_t& taken) {
  CurrentContext current(driver(), handle_);
  Piece spare{0, 1};
  std::uint64_t current_generation = 0;
  CUresult result = CUDA_SUCCESS;
  for (;;) {
    bool another_has_it = false;
    {
      std::lock_guard lock(mutex_);
      current_generation = generation();
      spare.address = std::exchange(spare_, 0);
      another_has_it = spare_users_ != 0;
      if (spare.address != 0) ++spare_users_;
    }
    if (spare.address != 0) break;
    result = current.result();
    if (result == CUDA_SUCCESS) result = driver().call(driver().cuMemAlloc_v2, &spare.address, std::size_t{1});
    if (result == CUDA_SUCCESS) {
      std::lock_guard lock(mutex_);
      ++spare_users_;
      break;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
    // The device is full. An unused segment is as good to free; else whoever has the spare will bring it back.
    std::vector<Piece> segment;
    if (const std::uint64_t bytes = unused(); bytes != 0) segment = detach_unused(bytes - 1);
    if (!segment.empty()) {
      spare = segment.back();
      segment.pop_back();
      give_back(std::move(segment), current_generation);
      std::lock_guard lock(mutex_);
      ++spare_users_;
      break;
    }
    // Here while a capture is open, too: no call of Vmm's breaks one (measured), and a free must not fail.
    if (vmm_.on() && vmm_.release(0, current_generation) != 0) continue;
    if (!another_has_it) return result;
    std::this_thread::yield();
  }
  const std::uint64_t start = ticks();
  result = driver().call(driver().cuMemFree_v2, spare.address);
  taken = ticks() - start;
  if (!note(result)) refused(spare, current_generation);
  take_spare();
  std::lock_guard lock(mutex_);
  --spare_users_;
  return result;
}

void Context::take_spare() {
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    if (spare_ != 0) return;
    generation = events_.generation();
  }
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), handle_);
  CUdeviceptr fresh = 0;
  if (current.result() != CUDA_SUCCESS || driver().call(driver().cuMemAlloc_v2, &fresh, std::size_t{1}) != CUDA_SUCCESS)
    return;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;  // reset meanwhile: what the address is now is not ours
    if (spare_ == 0) std::swap(spare_, fresh);
  }
  if (fresh != 0) driver().call(driver().cuMemFree_v2, fresh);  // another thread was first
}

bool Context::record_fence(Fence& fence) {
  if (!context_fences() || closing_.load(std::memory_order_relaxed) != 0) return false;
  bool complete = true;
  const auto record = [&](Context& context) {
    FenceEvent event{&context.events_, context.events_.generation(), context.events_.take(driver(), context.handle_)};
    if (event.event == nullptr) {
      complete = false;
      return;
    }
    fence.events.push_back(event);
    if (!shared_.gate.enter()) {
      complete = false;
      return;
    }
    const CUresult result = mutated(Mutation::legacy_fence)
                                ? record_legacy(driver(), context.handle_, event.event)
                                : driver().call(driver().cuCtxRecordEvent, context.handle_, event.event);
    shared_.gate.leave();
    complete = complete && context.note(result);
  };
  record(*this);
  if (complete && shared_.peers.load(std::memory_order_relaxed)) {
    shared_.for_each_context([&](Context& other) {
      if (&other != this && other.alive() && other.closing_.load(std::memory_order_relaxed) == 0) record(other);
    });
  }
  if (!complete) {
    for (FenceEvent& event : fence.events) event.release();
    fence.events.clear();
  }
  return complete;
}

bool Context::is_complete(std::span<const FenceEvent> events) noexcept {
  return std::all_of(events.begin(), events.end(), [&](const FenceEvent& e) {
    const CUresult result = e.query(driver());
    if (e.pool == &events_) note(result);  // another context's error is its own
    return result == CUDA_SUCCESS || mutated(Mutation::fence_not_asked);
  });
}

bool Context::becomes_idle(std::uint64_t patience_ns) noexcept try {
  const std::uint64_t deadline = monotonic_ns() + patience_ns;
  Fence fence;
  RelaxedCaptureMode relaxed(driver());
  if (!record_fence(fence)) return false;
  bool idle = is_complete(fence.events);
  while (!idle && broken() == CUDA_SUCCESS && monotonic_ns() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    idle = is_complete(fence.events);
  }
  for (FenceEvent& event : fence.events) event.release();
  return idle;
} catch (...) {  // no host memory
  return false;
}

CUresult Context::wait_idle() noexcept try {
  std::uint64_t taken = 0;
  const CUresult result = wait_for_context(taken);
  shared_.count_wait(shared_.counters.free_waits, taken);
  return result;
} catch (...) {  // no host memory
  return CUDA_ERROR_OUT_OF_MEMORY;
}

bool Context::order_after_all(CUstream stream) noexcept try {
  Fence fence;
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), handle_);
  if (!record_fence(fence)) return false;
  const bool ordered = std::all_of(fence.events.begin(), fence.events.end(), [&](const FenceEvent& e) {
    return note(driver().call(driver().cuStreamWaitEvent, stream, e.event, 0u));
  });
  for (FenceEvent& event : fence.events) event.release();  // a wait took the event's state at the call
  return ordered;
} catch (...) {  // no host memory
  return false;
}

void Context::poll(std::uint64_t newest) {
  RelaxedCaptureMode relaxed(driver());
  if (untidy_.load(std::memory_order_relaxed)) collect();  // what idle lanes keep
  if (!context_fences()) poll_streams();
  for_each_arena([&](const Arena& arena) { newest = std::max(newest, arena.newest_unclean()); });
  if (fences_.wants_fence(newest)) {
    Fence fresh;
    fresh.stamp = fences_.advance();
    if (record_fence(fresh)) {
      if (mutated(Mutation::fence_event_given_back)) {
        for (FenceEvent& event : fresh.events) event.release();
      }
      if (mutated(Mutation::allocation_waits)) {
        for (const FenceEvent& event : fresh.events) driver().call(driver().cuEventSynchronize, event.event);
      }
      fences_.add(std::move(fresh));
    }
  }
  std::vector<FenceEvent> events;
  for (bool complete = true; complete;) {
    const std::uint64_t id = fences_.claim(events);
    if (id == 0) break;
    complete = is_complete(events);
    fences_.finish(id, complete);
  }
  const std::uint64_t through = fences_.clean_through();
  for (auto& slot : arenas_) {
    if (Arena* arena = slot.load(std::memory_order_acquire)) {
      poll_evented(*arena);
      std::lock_guard lock(arena->mutex);
      arena->clean_up(through);
    }
  }
  tidy_lanes();
}

void Context::poll_evented(Arena& arena) {
  constexpr std::size_t kAtOnce = 64;
  std::vector<Arena::Evented> asked;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(arena.mutex);
    generation = arena.generation();
    for (Arena::Evented& e : arena.evented) {
      if (e.being_queried || asked.size() == kAtOnce) continue;
      asked.push_back(e);
      e.being_queried = true;
    }
  }
  if (asked.empty()) return;
  std::vector<bool> complete;
  complete.reserve(asked.size());
  for (const Arena::Evented& e : asked) complete.push_back(is_complete({&e.event, 1}));
  std::lock_guard lock(arena.mutex);
  if (generation != arena.generation()) return;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const Arena::Evented& e = asked[i];
    const auto at = std::find_if(arena.evented.begin(), arena.evented.end(),
                                 [&](const Arena::Evented& other) { return other.block == e.block; });
    at->being_queried = false;
    if (!complete[i]) continue;
    arena.pool.settle_evented(at->block, *arena.clean);
    at->event.release();
    arena.evented.erase(at);
  }
}

bool Context::streams_idle() {
  // A green context's work is on streams that are not ours to know; a peer's is another context's.
  if (shared_.green_contexts.load(std::memory_order_relaxed) || shared_.peers.load(std::memory_order_relaxed))
    return false;
  std::vector<CUevent> farewells;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    generation = events_.generation();
    farewells = farewells_;
  }
  CurrentContext current(driver(), handle_);
  const auto succeeded = [&](CUresult result) {
    if (is_sticky(result)) note(result);
    return result == CUDA_SUCCESS;
  };
  const auto gone = [&](CUevent event) { return succeeded(driver().call(driver().cuEventQuery, event)); };
  const bool none_left = std::all_of(farewells.begin(), farewells.end(), gone);
  if (none_left && !farewells.empty()) {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return false;
    std::erase_if(farewells_, [&](CUevent event) {
      if (std::find(farewells.begin(), farewells.end(), event) == farewells.end()) return false;
      events_.put(event, generation);
      return true;
    });
  }
  const auto idle = [&](CUstream stream) { return succeeded(driver().call(driver().cuStreamQuery, stream)); };
  if (!none_left || !shared_.gate.enter()) return false;  // the legacy stream is not touched while a capture is open
  const bool all = idle(stream_handle(kLegacyStream)) &&
                   (mutated(Mutation::idle_means_legacy_idle) || shared_.streams.all_of(handle_, idle));
  shared_.gate.leave();
  return all;
}

void Context::poll_streams() {
  // Without context fences a stream is asked itself: idle now means that every free on it so far is complete. A query
  // makes no dependency, on the legacy stream neither. With peers, or while a capture is open, nothing is asked.
  if (shared_.peers.load(std::memory_order_relaxed) || shared_.gate.may_be_open()) return;
  const std::uint64_t generation = events_.generation();
  std::uint64_t stamp = fences_.advance();
  if (shared_.streams.complete() && streams_idle()) {
    if (generation == events_.generation()) fences_.completed(stamp);
    return;
  }
  struct Asked {
    LaneRef lane;
    CUstream stream;
    bool idle;
  };
  std::vector<Asked> asked;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;
    stamp = fences_.advance();
    for (const auto& [id, lane] : lanes_) {
      const StreamIdentity& stream = lane->identity();
      if (stream.owner_thread != 0 && stream.owner_thread != thread_id()) continue;
      asked.push_back({{lane, lane->serial()}, stream.handle, false});
      ++lane->queries;
    }
  }
  if (shared_.gate.enter()) {
    CurrentContext current(driver(), handle_);
    for (Asked& a : asked) {
      const CUresult result = driver().call(driver().cuStreamQuery, a.stream);
      a.idle = result == CUDA_SUCCESS;
      if (is_sticky(result)) note(result);
    }
    shared_.gate.leave();
  }
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return;
  for (const Asked& a : asked) {
    --a.lane.lane->queries;
    if (!a.idle) continue;
    for_each_arena([&](Arena& arena) {
      Heap* heap = a.lane.lane->heaps[static_cast<std::size_t>(arena.index())];
      if (heap == nullptr) return;
      heap->bins.for_each([&](Block* block) {
        if (block->idle.stamp <= stamp) arena.pool.move(block, *arena.clean);
      });
    });
  }
}

// ---- what the program's own calls tell ---------------------------------------------------------------------------

Context::Position Context::position(std::uint64_t stream_id) {
  std::lock_guard lock(mutex_);
  const auto found = lanes_.find(stream_id);
  if (found == lanes_.end()) return {};
  Lane* lane = found->second;
  Position position{lane->serial(), fences_.advance(), events_.generation(), lane, {}};
  lane->enter();
  position.before = lane->before;
  lane->leave();
  return position;
}

void Context::order_after(const StreamIdentity& stream, const Position& position) {
  std::lock_guard lock(mutex_);
  if (position.generation != events_.generation()) return;
  const LaneRef by = find_or_make_lane(stream);
  Lane& lane = *by.lane;
  lane.enter();
  std::erase_if(lane.before, [&](const Lane::Before& b) { return b.stamp <= fences_.clean_through(); });
  const std::uint64_t stamp = mutated(Mutation::wait_orders_later_frees) ? kAnyStamp : position.stamp;
  lane.order_after({position.serial, stamp, position.lane});
  for (const Lane::Before& earlier : position.before) lane.order_after(earlier);
  lane.leave();
}

void Context::synchronized(std::uint64_t stamp, std::uint64_t generation) {
  const std::uint64_t keep = options().release_threshold.of(device_bytes_);
  if (generation != events_.generation() || shared_.peers.load(std::memory_order_relaxed)) return;
  fences_.completed(stamp);
  if (guard_bytes_ != 0) [[unlikely]]
    guard_.poll();
  if (keep < gauges_.held.current() && unused() > keep) release_unused(keep);
}

void Context::stream_going(const StreamIdentity& stream) {
  if (mutated(Mutation::stream_known_by_handle)) return;
  for (;;) {
    std::unique_lock lock(mutex_);
    const auto found = lanes_.find(stream.id);
    if (found == lanes_.end()) break;
    if (found->second->queries == 0) {
      end_lane(*found->second);
      break;
    }
    lock.unlock();
    std::this_thread::yield();  // somebody asks the stream just now: it must not vanish under the question
  }
  // Older drivers have no such fence: an event says when the stream's work is over.
  if (driver().cuCtxRecordEvent != nullptr) return;
  const std::uint64_t generation = events_.generation();
  RelaxedCaptureMode relaxed(driver());
  CUevent event = nullptr;
  if (!shared_.gate.capturing(driver(), stream.handle)) event = events_.take(driver(), handle_);
  CurrentContext current(driver(), handle_);
  if (event == nullptr || !note(driver().call(driver().cuEventRecord, event, stream.handle))) {
    shared_.streams.lose();  // nothing will say it
    if (event != nullptr) events_.put(event, generation);
    return;
  }
  std::lock_guard lock(mutex_);
  if (generation == events_.generation()) farewells_.push_back(event);
}

// First every lane ends, so that no block comes into a magazine any more: a free that still has one enters a lane of
// the next incarnation, which it gets only when this is over, and finds its arena's generation changed. Then the arenas
// forget their memory, the global one last: until they have, their superblocks must be found in the map.
void Context::discard() {
  if (mutated(Mutation::reset_forgets_nothing)) return;
  const auto calls = vmm_.hold();
  std::lock_guard lock(mutex_);
  const auto end = [&](Lane& lane) {
    lane.enter();
    lane.end();
    for (unsigned at = 0; lane.magazine.drain(at) != nullptr;) {
    }
    lane.leave();
    lane.queries = 0;
  };
  for (const auto& lane : host_) end(*lane);
  for (const auto& [id, lane] : lanes_) {
    end(*lane);
    spare_lanes_.push_back(lane);
  }
  shared_.stream_lanes.fetch_sub(static_cast<int>(lanes_.size()), std::memory_order_relaxed);
  lanes_.clear();
  const auto forget = [&](Arena& arena) {
    std::lock_guard inner(arena.mutex);
    if (arena.index() == 0 && !vmm_.on()) gauges_.held.subtract(arena.pool.held());
    arena.pool.for_each_live([&](const Pool::LiveBlock& block) {
      count(shared_.counters.reset_blocks);
      count(shared_.counters.reset_bytes, block.requested);
      if (block.note.stack != 0)
        shared_.stacks.freed(block.note.stack, block.address, block.requested, monotonic_ns() - block.note.time);
      gauges_.requested.subtract(block.requested);
      gauges_.handed_out.subtract(block.size);
    });
    arena.abandon();
  };
  for (auto slot = arenas_.rbegin(); slot != arenas_.rend(); ++slot) {
    if (Arena* arena = slot->load(std::memory_order_relaxed)) forget(*arena);
  }
  farewells_.clear();
  for (const Piece& piece : refused_) gauges_.held.subtract(piece.bytes);
  refused_.clear();
  spare_ = 0;
  fences_.abandon();
  events_.discard();
  promised_ = 0;
  growing_ = 0;
  initial_done_ = false;
  pressure_.store(false, std::memory_order_relaxed);
  broken_.store(0, std::memory_order_relaxed);
  for (auto& stream : own_streams_) stream.store(nullptr, std::memory_order_relaxed);
  async_.discard();
  if (vmm_.on()) vmm_.discard();
  guard_.discard();
  quarantine_.discard();
  for (const auto& lane : host_) lane->open(next_serial(), nullptr);
  alive_.store(false, std::memory_order_release);
  shared_.handle_epoch.fetch_add(1, std::memory_order_release);
}

// ---- giving memory back ------------------------------------------------------------------------------------------

void Context::admit(CUdevice device, bool on) noexcept try {
  if (options().allocator == AllocatorKind::async && on) async_.admit(device);
  if (vmm_.on()) vmm_.admit(device, on);
} catch (...) {  // no host memory: the device has no access
}

std::uint64_t Context::release_unused(std::uint64_t keep) {
  if (shared_.gate.may_be_open() || closing_.load(std::memory_order_relaxed) != 0) return 0;
  RelaxedCaptureMode relaxed(driver());
  collect();
  if (vmm_.on()) {  // nothing of it waits for the device
    const std::uint64_t handles = vmm_.release(keep, events_.generation());
    if (handles == 0) return 0;
    pressure_.store(false, std::memory_order_relaxed);
    count(shared_.counters.releases, handles);
    log::debug("device {}: {} handles went back to the driver", device_, handles);
    return handles;
  }
  // The real cuMemFree waits for the context: only where a fresh fence says that there is nothing to wait for, so that
  // a kernel that runs for ever cannot hang us (contract §6).
  const std::uint64_t generation = events_.generation();
  {
    std::lock_guard lock(mutex_);
    std::lock_guard arena(global().mutex);
    if (refused_.empty() && global().pool.free_bytes() == 0) return 0;
  }
  if (context_fences()) {
    Fence fence;
    fence.stamp = fences_.advance();
    if (!record_fence(fence)) return 0;
    const bool idle = is_complete(fence.events);
    for (FenceEvent& event : fence.events) event.release();
    if (!idle) return 0;
    fences_.completed(fence.stamp);
  } else {
    poll_streams();
    if (!streams_idle()) return 0;
  }
  return give_back(detach_unused(keep), generation);
}

void Context::release_idle() {
  const std::uint64_t now = coarse_ns();
  std::uint64_t due = idle_due_.load(std::memory_order_relaxed);
  if (now < due || !idle_due_.compare_exchange_strong(due, now + options().idle_release.ns, std::memory_order_relaxed))
    return;
  std::uint64_t idle = 0;
  {
    std::lock_guard lock(global().mutex);
    idle = global().pool.take_least_unused();
  }
  const std::uint64_t all = unused();  // what caches held is free from here on
  if (due != 0 && idle != 0 && all != 0) release_unused(all - std::min(all, idle));
}

std::vector<Context::Piece> Context::detach_unused(std::uint64_t keep) {
  unused();
  std::vector<Piece> back;
  std::uint64_t bytes = 0;
  std::lock_guard lock(global().mutex);
  Pool& pool = global().pool;
  for (Segment* segment = pool.segments(); segment != nullptr && pool.unused() > keep;) {
    Segment* next = segment->next;
    const Block* block = Pool::wholly_free(*segment);
    if (block != nullptr && block->heap == global().clean->index) {
      back.push_back({segment->address(), segment->size()});
      bytes += segment->size();
      pool.remove(segment);
    }
    segment = next;
  }
  gauges_.held.subtract(bytes);
  if (bytes != 0) pressure_.store(false, std::memory_order_relaxed);
  return back;
}

std::uint64_t Context::give_back(std::vector<Piece> segments, std::uint64_t generation) {
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return 0;
    segments.insert(segments.end(), refused_.begin(), refused_.end());
    for (const Piece& piece : refused_) gauges_.held.subtract(piece.bytes);
    refused_.clear();
  }
  if (segments.empty()) return 0;
  RelaxedCaptureMode relaxed(driver());
  std::uint64_t gone = 0;
  for (const Piece& segment : segments) {
    if (note(driver().call(driver().cuMemFree_v2, segment.address))) {
      ++gone;
    } else {
      refused(segment, generation);
    }
  }
  count(shared_.counters.releases, gone);
  log::debug("device {}: {} segments went back to the driver", device_, gone);
  return gone;
}

void Context::refused(const Piece& piece, std::uint64_t generation) noexcept try {
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return;  // reset meanwhile: it went along
  refused_.push_back(piece);
  gauges_.held.add(piece.bytes);
} catch (...) {  // no host memory to remember it by: it is lost until the context ends
}

std::uint64_t Context::relieve(std::uint64_t patience_ns) {
  if (quarantine_.on()) quarantine_.empty();
  poll();
  std::uint64_t released = release_unused(0);
  const std::uint64_t deadline = monotonic_ns() + patience_ns;
  const std::uint64_t start = ticks();
  bool waited = false;
  while (released == 0 && !shared_.gate.may_be_open() && broken() == CUDA_SUCCESS && monotonic_ns() < deadline) {
    if (unused() == 0 && !anything_unclean()) break;  // waiting would free nothing
    waited = true;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    poll();
    released = release_unused(0);
  }
  if (waited) {
    count(shared_.counters.memory_waits);
    count(shared_.counters.wait_ticks, ticks() - start);
  }
  return released;
}

std::uint64_t Context::unused() noexcept try {
  collect();
  poll();
  collect();  // superblocks that have become whole
  const std::uint64_t through = fences_.clean_through();
  for_each_arena([&](Arena& arena) { arena.clean_up(through); });  // and so do segments
  if (vmm_.on()) return vmm_.unused();
  std::lock_guard lock(global().mutex);
  return global().pool.unused();
} catch (...) {
  return 0;
}

}  // namespace cushion
