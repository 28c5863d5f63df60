#include "core/context.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/log.h"
#include "core/thread.h"

namespace cushion {
namespace {

constexpr std::uint64_t kAnyStamp = ~std::uint64_t{0};
constexpr std::size_t kMostEvented = 1024;

// Errors that say "not while a capture is open": the call touched nothing else.
bool is_capture_error(CUresult r) noexcept {
  return r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && r <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

}  // namespace

// Runs call(stream), a call of Cushion's own on a stream of the program's. While a blocking stream captures, touching
// the legacy stream would invalidate the capture (contract §4): then it is not called.
template <class Call>
CUresult Context::on_stream(CUstream stream, Call call) noexcept {
  if (!is_legacy(stream)) return call(stream);
  if (!shared_.gate.enter()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  const CUresult result = call(stream);
  shared_.gate.leave();
  return result;
}

Context::Context(Shared& shared, CUcontext handle, CUdevice device, std::uint64_t device_bytes, bool primary)
    : shared_(shared),
      handle_(handle),
      device_(device),
      device_bytes_(device_bytes),
      primary_(primary),
      pool_(shared.map, this),
      async_(shared, *this) {
  clean_ = pool_.make_heap(Order::clean);
  pending_ = pool_.make_heap(Order::pending);
}

bool Context::note(CUresult result) noexcept {
  if (is_sticky(result)) broken_.store(static_cast<int>(result), std::memory_order_relaxed);
  return result == CUDA_SUCCESS;
}

bool Context::context_fences() const noexcept {
  return driver().cuCtxRecordEvent != nullptr && !shared_.green_contexts.load(std::memory_order_relaxed);
}

// ---- heaps -------------------------------------------------------------------------------------------------------

Heap* Context::find_heap(std::uint64_t stream_id) noexcept {
  const auto found = stream_heaps_.find(stream_id);
  return found == stream_heaps_.end() ? nullptr : found->second;
}

Heap* Context::heap_of(const StreamIdentity& stream) {
  if (Heap* heap = find_heap(stream.id)) return heap;
  Heap* heap = pool_.make_heap(Order::stream);
  heap->stream_id = stream.id;
  heap->stream = stream.handle;
  heap->owner_thread = stream.owner_thread;
  stream_heaps_.emplace(stream.id, heap);
  shared_.stream_heaps.fetch_add(1, std::memory_order_relaxed);
  return heap;
}

std::uint64_t Context::newest_free() const noexcept {
  std::uint64_t newest = 0;
  for (const Heap* heap : pool_.heaps()) {
    if (heap != nullptr && heap->order != Order::clean && !heap->bins.empty()) newest = std::max(newest, heap->newest);
  }
  return newest;
}

void Context::clean_up() noexcept {
  const std::uint64_t through = fences_.clean_through();
  for (Evented& e : evented_) {
    if (e.serial == 0 || e.being_queried || e.block->idle.stamp > through) continue;
    pool_.settle_evented(e.block, *clean_);
    e.event.release();
    e.block = nullptr;
  }
  std::erase_if(evented_, [](const Evented& e) { return e.block == nullptr; });
  for (Heap* heap : pool_.heaps()) {
    if (heap == nullptr || heap->order == Order::clean) continue;
    heap->bins.for_each([&](Block* block) {
      if (block->idle.stamp <= through) pool_.move(block, *clean_);
    });
    // A stream's heap that is empty and knows no order that still matters can be made again when it is needed.
    const bool idle = heap->order == Order::stream && heap->bins.empty() && heap->queries == 0 &&
                      heap->newest <= through &&
                      std::all_of(heap->before.begin(), heap->before.end(),
                                  [&](const Heap::Before& b) { return b.stamp <= through; });
    if (!idle) continue;
    stream_heaps_.erase(heap->stream_id);
    shared_.stream_heaps.fetch_sub(1, std::memory_order_relaxed);
    pool_.drop(heap);
  }
  tidy_at_ = std::max<std::size_t>(64, 2 * stream_heaps_.size());
}

// ---- allocation --------------------------------------------------------------------------------------------------

Block* Context::try_take(const Need& need, const Request& request) {
  Block* block = nullptr;
  Heap* own = clean_;
  if (request.stream != nullptr) {
    own = heap_of(*request.stream);
    block = pool_.take(*own, need.size, need.alignment, kAnyStamp);
  }
  if (block == nullptr && own != clean_) {
    for (Evented& e : evented_) {  // its own, freed under pressure: no wait is needed
      if (e.serial != own->serial || e.being_queried || !Bins::fits(*e.block, need.size, need.alignment) ||
          Bins::lead(*e.block, need.alignment) != 0) {
        continue;
      }
      block = e.block;
      const std::uint64_t freed = block->idle.stamp;
      pool_.take_evented(block);
      pool_.trim(block, need.size, *own, freed);
      e.event.release();
      evented_.erase(evented_.begin() + (&e - evented_.data()));
      break;
    }
  }
  if (block == nullptr) block = pool_.take(*clean_, need.size, need.alignment, kAnyStamp);
  if (block == nullptr && own != clean_) {
    for (const Heap::Before& earlier : own->before) {
      Heap* heap = pool_.heap(earlier.index);
      if (heap == nullptr || heap->serial != earlier.serial) continue;
      block = pool_.take(*heap, need.size, need.alignment, earlier.stamp);
      if (block != nullptr) break;
    }
  }
  if (block != nullptr) hand_out(*block, request);
  return block;
}

void Context::hand_out(Block& block, const Request& request) noexcept {
  block.api = request.api;
  block.live.requested = request.bytes;
  block.live.stream = request.stream != nullptr ? static_cast<std::uint32_t>(request.stream->id) : 0;
  if (options().track != TrackLevel::off) {
    block.live.time = ticks();
    block.live.thread = static_cast<std::uint32_t>(thread_id());
  }
  bump(counters_.served[static_cast<int>(request.api)]);
  usage_.requested.add(request.bytes);
  usage_.handed_out.add(block.size);
}

void Context::account_free(const Block& block) noexcept {
  usage_.requested.subtract(block.live.requested);
  usage_.handed_out.subtract(block.size);
  bump(counters_.frees_served);
}

bool Context::claim(Block& block, std::uint64_t address) noexcept {
  if (block.state.load(std::memory_order_relaxed) != BlockState::live ||
      block.address.load(std::memory_order_relaxed) != address) {
    return false;
  }
  block.state.store(BlockState::freeing, std::memory_order_relaxed);
  return true;
}

void Context::unclaim(Block& block, std::uint64_t address) noexcept {
  std::lock_guard lock(mutex_);
  if (block.state.load(std::memory_order_relaxed) == BlockState::freeing &&
      block.address.load(std::memory_order_relaxed) == address) {
    block.state.store(BlockState::live, std::memory_order_relaxed);
  }
}

bool Context::allocate(const Request& request, CUdeviceptr* out) noexcept {
  if (!serves() || request.bytes > device_bytes_) return false;
  // Without context fences nothing says when a peer's work is complete.
  if (shared_.peers.load(std::memory_order_relaxed) && !context_fences()) return false;
  const bool big = request.bytes > kBigRequest;
  const Need need{round_up(request.bytes, big ? kBigAlignment : kUnit), big ? kBigAlignment : kUnit};
  try {
    Block* block = nullptr;
    bool untidy = false;
    const std::uint64_t generation = events_.generation();
    {
      std::lock_guard lock(mutex_);
      block = try_take(need, request);
      untidy = stream_heaps_.size() >= tidy_at_;
    }
    if (untidy) poll();
    if (block == nullptr) block = search(need, request);
    if (block == nullptr) return false;
    *out = block->address.load(std::memory_order_relaxed);
    if (options().init != InitMode::none && !fill(*block, request)) {
      std::lock_guard lock(mutex_);  // what it promised cannot be kept: the driver's memory is zero at least
      if (generation != events_.generation()) return false;
      bump(counters_.served[static_cast<int>(request.api)], ~std::uint64_t{0});
      account_free(*block);
      bump(counters_.frees_served, ~std::uint64_t{0});
      pool_.give(block, *pending_, fences_.next_stamp());
      return false;
    }
  } catch (...) {  // no host memory: the driver may still have what is needed
    return false;
  }
  return true;
}

Block* Context::search(const Need& need, const Request& request) {
  poll();
  {
    std::lock_guard lock(mutex_);
    if (Block* block = try_take(need, request)) return block;
  }
  CUresult why = CUDA_SUCCESS;
  Block* block = grow(need, request, false, why);
  if (block == nullptr && request.stream != nullptr) block = steal(need, request);
  if (block != nullptr || why != CUDA_ERROR_OUT_OF_MEMORY) return block;

  // Out of memory. Wait for freed blocks only where they could help, and never while a capture is open.
  std::uint64_t pool_free = 0;
  std::uint64_t held = 0;
  std::uint64_t hole = 0;
  bool unclean = false;
  {
    std::lock_guard lock(mutex_);
    pool_free = pool_.free_bytes();
    held = pool_.held();
    hole = pool_.largest_free();
    unclean = newest_free() != 0 || !evented_.empty();
  }
  if (need.size <= pool_free && unclean && !shared_.gate.may_be_open() && options().oom_wait.ns != 0) {
    count(shared_.counters.memory_waits);
    block = wait_for_blocks(need, request);
  }
  if (block == nullptr && release_unused(0) != 0) block = grow(need, request, true, why);
  if (block == nullptr) {
    count(shared_.counters.out_of_memory);
    log::warn("out of memory on device {}: {} bytes asked; the pool holds {} bytes, {} of them free, largest hole {}",
              device_, request.bytes, held, pool_free, hole);
  }
  return block;
}

Block* Context::wait_for_blocks(const Need& need, const Request& request) {
  const std::uint64_t start = ticks();
  const std::uint64_t deadline = monotonic_ns() + options().oom_wait.ns;
  auto pause = std::chrono::microseconds(20);
  Block* block = nullptr;
  while (block == nullptr && monotonic_ns() < deadline && broken() == CUDA_SUCCESS) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
    poll();
    std::lock_guard lock(mutex_);
    block = try_take(need, request);
    if (newest_free() == 0 && evented_.empty()) break;  // nothing left to wait for
  }
  count(shared_.counters.wait_ticks, ticks() - start);
  return block;
}

// `why` is what the driver said; success without a block: MAX_SIZE does not allow it, or another thread took the
// segment.
Block* Context::grow(const Need& need, const Request& request, bool exact, CUresult& why) {
  constexpr std::uint64_t kPage = AddressMap::kPage;
  const std::uint64_t least = round_up(need.size, kPage);
  std::uint64_t want = least;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    generation = events_.generation();
    const std::uint64_t most = options().max_size.of(device_bytes_);
    const std::uint64_t have = pool_.held() + promised_;
    const std::uint64_t room = most > have ? most - have : 0;
    if (least > room) {
      why = CUDA_SUCCESS;
      pressure_ = true;
      return nullptr;
    }
    if (!exact && growing_ == 0) {
      // An eighth of what is held: geometric, and at most an eighth too much.
      const std::uint64_t floor = options().segment_size.of(device_bytes_);
      std::uint64_t target = std::max(floor, std::min(pool_.held() / 8, options().growth_max.of(device_bytes_)));
      if (!initial_done_) target = std::max(target, options().initial_size.of(device_bytes_));
      want = std::max(least, std::min(round_up(target, kPage), room / kPage * kPage));
    }
    initial_done_ = true;
    promised_ += want;
    ++growing_;
  }
  CUdeviceptr address = 0;
  CUresult result = CUDA_SUCCESS;
  const std::uint64_t promised = want;
  {
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), handle_);
    if (want > least) {  // speculative: leaves the rest of the device to others (contract §6)
      std::size_t idle = 0;
      std::size_t total = 0;
      const std::uint64_t reserve = std::max(device_bytes_ / 50, std::uint64_t{512} << 20);
      if (!note(driver().call(driver().cuMemGetInfo_v2, &idle, &total)) || idle < want + reserve) want = least;
    }
    result = driver().call(driver().cuMemAlloc_v2, &address, static_cast<std::size_t>(want));
    if (result == CUDA_ERROR_OUT_OF_MEMORY && want > least) {
      want = least;
      result = driver().call(driver().cuMemAlloc_v2, &address, static_cast<std::size_t>(want));
    }
    note(result);
  }
  why = result;
  Block* block = nullptr;
  bool added = false;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return nullptr;  // reset meanwhile: what the address is now is not ours
    promised_ -= promised;
    --growing_;
    if (result != CUDA_SUCCESS) {
      pressure_ = pressure_ || result == CUDA_ERROR_OUT_OF_MEMORY;
      return nullptr;
    }
    added = address % kPage == 0 && pool_.add(address, want, *clean_);
    if (added) {
      pressure_ = false;
      usage_.held.add(want);
      count(shared_.counters.grows);
      block = try_take(need, request);
    }
  }
  if (added) {
    take_spare();
    log::debug("device {}: segment of {} bytes at {:#x}", device_, want, address);
  } else {  // the host is out of memory
    RelaxedCaptureMode relaxed(driver());
    driver().call(driver().cuMemFree_v2, address);
  }
  return block;
}

Block* Context::steal(const Need& need, const Request& request) {
  Evented chosen{};
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    const auto usable = std::find_if(evented_.begin(), evented_.end(), [&](const Evented& e) {
      return e.serial != 0 && !e.being_queried && e.block->size >= need.size &&
             Bins::lead(*e.block, need.alignment) == 0;
    });
    if (usable == evented_.end()) return nullptr;
    usable->being_queried = true;
    chosen = *usable;
    generation = events_.generation();
  }
  CUresult result = CUDA_SUCCESS;
  {
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), handle_);
    result = on_stream(request.stream->handle, [&](CUstream stream) {
      return driver().call(driver().cuStreamWaitEvent, stream, chosen.event.event, 0u);
    });
  }
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return nullptr;
  const auto at =
      std::find_if(evented_.begin(), evented_.end(), [&](const Evented& e) { return e.block == chosen.block; });
  if (!note(result)) {
    at->being_queried = false;
    return nullptr;
  }
  evented_.erase(at);
  chosen.event.release();  // the wait took the event's state at the call: it may be recorded again
  count(shared_.counters.stream_waits);
  Heap* heap = heap_of(*request.stream);
  pool_.take_evented(chosen.block);
  pool_.trim(chosen.block, need.size, *heap, fences_.next_stamp());
  hand_out(*chosen.block, request);
  return chosen.block;
}

bool Context::fill(const Block& block, const Request& request) noexcept {
  const unsigned char value = fill_byte(options().init);
  const CUdeviceptr address = block.address.load(std::memory_order_relaxed);
  const auto set = [&](CUstream stream) {
    return driver().call(driver().cuMemsetD8Async, address, value, static_cast<std::size_t>(request.bytes), stream);
  };
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), handle_);
  if (request.stream != nullptr) return note(on_stream(request.stream->handle, set));
  // cudaMalloc has no stream: an own one, non-blocking, so that nothing of the program is waited for.
  CUstream stream = fill_stream_.load(std::memory_order_acquire);
  if (stream == nullptr) {
    if (!note(driver().call(driver().cuStreamCreate, &stream, static_cast<unsigned>(CU_STREAM_NON_BLOCKING))))
      return false;
    CUstream first = nullptr;
    if (!fill_stream_.compare_exchange_strong(first, stream, std::memory_order_acq_rel)) {
      driver().call(driver().cuStreamDestroy_v2, stream);  // another thread was first
      stream = first;
    }
  }
  return note(set(stream)) && note(driver().call(driver().cuStreamSynchronize, stream));
}

// ---- free --------------------------------------------------------------------------------------------------------

CUresult Context::free(Block* block, std::uint64_t address) noexcept try {
  const bool fenced = context_fences();
  std::uint64_t generation = 0;
  std::uint64_t stamp = 0;
  {
    std::lock_guard lock(mutex_);
    if (!claim(*block, address)) return CUDA_ERROR_INVALID_VALUE;
    // Natively cudaFree of a stream-ordered block does not wait. Deferred frees need context fences to come back.
    if (broken() == CUDA_SUCCESS && fenced &&
        (block->api == Api::malloc_async || options().free == FreeMode::deferred)) {
      account_free(*block);
      pool_.give(block, *pending_, fences_.next_stamp());
      return CUDA_SUCCESS;
    }
    generation = events_.generation();
    stamp = fences_.stamp();
  }
  // After the stamp: whoever made peers true before a free that the stamp covers is seen here.
  const bool peers = shared_.peers.load(std::memory_order_relaxed);
  const bool waits = block->api != Api::malloc_async;  // else pending, until something waits for the context
  std::uint64_t taken = 0;
  const CUresult result = broken() != CUDA_SUCCESS ? broken() : waits ? wait_for_context(taken) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) {
    unclaim(*block, address);
    return result;
  }
  const bool unserved = peers && !fenced;  // nothing is handed out any more: memory goes where it goes natively
  const bool clean = waits && (unserved || !peers || becomes_idle(0));
  std::vector<CUdeviceptr> back;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return result;  // reset meanwhile: the block is gone
    account_free(*block);
    if (taken > shared_.noticeable_wait) {
      bump(counters_.free_waits);
      bump(counters_.wait_ticks, taken);
    }
    if (clean) {
      if (!unserved) fences_.completed(stamp);
      pool_.give(block, *clean_, stamp);
      if (unserved && !shared_.gate.may_be_open()) back = detach_unused(0);
    } else {
      pool_.give(block, *pending_, fences_.next_stamp());
    }
  }
  give_back(back, generation);
  return CUDA_SUCCESS;
} catch (...) {  // no host memory
  unclaim(*block, address);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult Context::free_async(Block* block, std::uint64_t address, const StreamIdentity& stream,
                             Context& stream_context) noexcept try {
  const bool foreign = &stream_context != this;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    if (broken() != CUDA_SUCCESS) return broken();
    if (!claim(*block, address)) return CUDA_ERROR_INVALID_VALUE;
    if (!foreign && !(pressure_ && evented_.size() < kMostEvented)) {
      Heap* heap = heap_of(stream);
      account_free(*block);
      pool_.give(block, *heap, fences_.next_stamp());
      return CUDA_SUCCESS;
    }
    evented_.reserve(kMostEvented);
    generation = events_.generation();
  }
  // Freed under pressure, or on another context's stream: an event inside the free says when it is over.
  FenceEvent event{&stream_context.events_, stream_context.events_.generation(), nullptr};
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  {
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
    unclaim(*block, address);
    return result;
  }
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return CUDA_SUCCESS;
  if (result == CUDA_SUCCESS && evented_.size() < evented_.capacity()) {
    const std::uint64_t serial = foreign ? 0 : heap_of(stream)->serial;
    account_free(*block);
    pool_.give_evented(block, *pending_, foreign ? 0 : fences_.next_stamp());
    evented_.push_back({block, event, serial, false});
    return CUDA_SUCCESS;
  }
  if (event.event != nullptr) event.release();
  // No event can say it. The stream's own order still can; another context's work is covered by fences over all of
  // them.
  Heap* heap = foreign ? pending_ : heap_of(stream);
  if (foreign) shared_.peers.store(true, std::memory_order_relaxed);
  account_free(*block);
  pool_.give(block, *heap, fences_.next_stamp());
  return CUDA_SUCCESS;
} catch (...) {  // no host memory
  unclaim(*block, address);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

// ---- fences ------------------------------------------------------------------------------------------------------

CUresult Context::wait_for_context(std::uint64_t& taken) {
  RelaxedCaptureMode relaxed(driver());
  if (!context_fences()) return native_wait(taken);
  FenceEvent fence{&events_, events_.generation(), events_.take(driver(), handle_)};
  if (fence.event == nullptr) return native_wait(taken);
  CUresult result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (shared_.gate.enter()) {
    // One reading of the clock for both calls: on an idle device they are most of what cudaFree costs.
    InsideDriver inside;
    const std::uint64_t start = ticks();
    result = driver().cuCtxRecordEvent(handle_, fence.event);
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
  CUdeviceptr spare = 0;
  CUresult result = CUDA_SUCCESS;
  for (;;) {
    bool another_has_it = false;
    {
      std::lock_guard lock(mutex_);
      spare = std::exchange(spare_, 0);
      another_has_it = spare_users_ != 0;
      if (spare != 0) ++spare_users_;
    }
    if (spare != 0) break;
    result = driver().call(driver().cuMemAlloc_v2, &spare, std::size_t{1});
    if (result == CUDA_SUCCESS) {
      std::lock_guard lock(mutex_);
      ++spare_users_;
      break;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
    // The device is full. An unused segment is as good to free; else whoever has the spare will bring it back.
    std::vector<CUdeviceptr> segment;
    {
      std::lock_guard lock(mutex_);
      if (pool_.unused() != 0) segment = detach_unused(pool_.unused() - 1);
      if (!segment.empty()) ++spare_users_;
    }
    if (!segment.empty()) {
      spare = segment.back();
      segment.pop_back();
      give_back(segment, generation());
      break;
    }
    if (!another_has_it) return result;
    std::this_thread::yield();
  }
  const std::uint64_t start = ticks();
  result = driver().call(driver().cuMemFree_v2, spare);
  taken = ticks() - start;
  note(result);
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
  if (driver().call(driver().cuMemAlloc_v2, &fresh, std::size_t{1}) != CUDA_SUCCESS) return;
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
    const CUresult result = driver().call(driver().cuCtxRecordEvent, context.handle_, event.event);
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
    return result == CUDA_SUCCESS;
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
  if (taken > shared_.noticeable_wait) {
    count(shared_.counters.free_waits);
    count(shared_.counters.wait_ticks, taken);
  }
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

void Context::poll() {
  RelaxedCaptureMode relaxed(driver());
  if (!context_fences()) poll_streams();
  Fence fresh;
  std::uint64_t generation = 0;
  bool wanted = false;
  {
    std::lock_guard lock(mutex_);
    generation = events_.generation();
    wanted = fences_.wants_fence(newest_free());
    fresh.stamp = fences_.stamp();
  }
  if (wanted && record_fence(fresh)) {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;
    fences_.add(std::move(fresh));
  }
  for (bool complete = true; complete;) {
    std::uint64_t id = 0;
    std::vector<FenceEvent> events;
    {
      std::lock_guard lock(mutex_);
      Fence* fence = generation == events_.generation() ? fences_.claim() : nullptr;
      if (fence == nullptr) break;
      id = fence->id;
      events = fence->events;
    }
    complete = is_complete(events);
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;
    for (FenceEvent& event : fences_.finish(id, complete)) event.release();
  }
  poll_evented();
  std::lock_guard lock(mutex_);
  clean_up();
}

void Context::poll_evented() {
  constexpr std::size_t kAtOnce = 64;
  std::vector<Evented> asked;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    generation = events_.generation();
    for (Evented& e : evented_) {
      if (e.being_queried || asked.size() == kAtOnce) continue;
      asked.push_back(e);
      e.being_queried = true;
    }
  }
  if (asked.empty()) return;
  std::vector<bool> complete;
  complete.reserve(asked.size());
  for (const Evented& e : asked) complete.push_back(is_complete({&e.event, 1}));
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const Evented& e = asked[i];
    const auto at =
        std::find_if(evented_.begin(), evented_.end(), [&](const Evented& other) { return other.block == e.block; });
    at->being_queried = false;
    if (!complete[i]) continue;
    pool_.settle_evented(at->block, *clean_);
    at->event.release();
    evented_.erase(at);
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
  const bool all = idle(stream_handle(kLegacyStream)) && shared_.streams.all_of(handle_, idle);
  shared_.gate.leave();
  return all;
}

void Context::poll_streams() {
  // Without context fences a stream is asked itself: idle now means that every free on it so far is complete. A query
  // makes no dependency, on the legacy stream neither. With peers, or while a capture is open, nothing is asked.
  if (shared_.peers.load(std::memory_order_relaxed) || shared_.gate.may_be_open()) return;
  std::uint64_t generation = 0;
  std::uint64_t stamp = 0;
  {
    std::lock_guard lock(mutex_);
    generation = events_.generation();
    stamp = fences_.stamp();
  }
  if (shared_.streams.complete() && streams_idle()) {
    std::lock_guard lock(mutex_);
    if (generation == events_.generation()) fences_.completed(stamp);
    return;
  }
  struct Asked {
    std::uint64_t serial;
    std::uint32_t index;
    CUstream stream;
    bool idle;
  };
  std::vector<Asked> asked;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;
    stamp = fences_.stamp();
    for (Heap* heap : pool_.heaps()) {
      if (heap == nullptr || heap->order != Order::stream || heap->bins.empty()) continue;
      if (heap->owner_thread != 0 && heap->owner_thread != thread_id()) continue;
      asked.push_back({heap->serial, heap->index, heap->stream, false});
      ++heap->queries;
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
    Heap* heap = pool_.heap(a.index);
    --heap->queries;
    if (!a.idle) continue;
    heap->bins.for_each([&](Block* block) {
      if (block->idle.stamp <= stamp) pool_.move(block, *clean_);
    });
  }
}

// ---- what the program's own calls tell ---------------------------------------------------------------------------

Context::Position Context::position(std::uint64_t stream_id) {
  std::lock_guard lock(mutex_);
  const Heap* heap = find_heap(stream_id);
  if (heap == nullptr) return {};
  return {heap->serial, fences_.stamp(), events_.generation(), heap->index, heap->before};
}

void Context::order_after(const StreamIdentity& stream, const Position& position) {
  std::lock_guard lock(mutex_);
  if (position.generation != events_.generation()) return;
  Heap* heap = heap_of(stream);
  std::erase_if(heap->before, [&](const Heap::Before& b) { return b.stamp <= fences_.clean_through(); });
  heap->order_after({position.serial, position.stamp, position.index});
  for (const Heap::Before& earlier : position.before) heap->order_after(earlier);
}

void Context::synchronized(std::uint64_t stamp, std::uint64_t generation) {
  const std::uint64_t keep = options().release_threshold.of(device_bytes_);
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation() || shared_.peers.load(std::memory_order_relaxed)) return;
    fences_.completed(stamp);
    if (keep >= pool_.held()) return;
    clean_up();
    if (pool_.unused() <= keep) return;
  }
  release_unused(keep);
}

void Context::stream_going(const StreamIdentity& stream) {
  // What was freed on it is from now on ordered by the whole context's fences, which cover a destroyed stream's work
  // too.
  for (;;) {
    std::unique_lock lock(mutex_);
    Heap* heap = find_heap(stream.id);
    if (heap == nullptr) break;
    if (heap->queries == 0) {
      heap->bins.for_each([&](Block* block) { pool_.move(block, *pending_); });
      stream_heaps_.erase(stream.id);
      shared_.stream_heaps.fetch_sub(1, std::memory_order_relaxed);
      pool_.drop(heap);
      break;
    }
    lock.unlock();
    std::this_thread::yield();  // somebody asks the stream just now: it must not vanish under the question
  }
  // Older drivers have no such fence: an event says when the stream's work is over.
  if (driver().cuCtxRecordEvent != nullptr || shared_.gate.capturing(driver(), stream.handle)) return;
  const std::uint64_t generation = events_.generation();
  RelaxedCaptureMode relaxed(driver());
  CUevent event = events_.take(driver(), handle_);
  CurrentContext current(driver(), handle_);
  if (event == nullptr || !note(driver().call(driver().cuEventRecord, event, stream.handle))) {
    shared_.streams.lose();  // nothing will say it
    return;
  }
  std::lock_guard lock(mutex_);
  if (generation == events_.generation()) farewells_.push_back(event);
}

void Context::discard() {
  std::lock_guard lock(mutex_);
  pool_.for_each_live([&](const Block& block) {
    count(shared_.counters.reset_blocks);
    count(shared_.counters.reset_bytes, block.live.requested);
    usage_.requested.subtract(block.live.requested);
    usage_.handed_out.subtract(block.size);
  });
  usage_.held.subtract(pool_.held());
  evented_.clear();
  farewells_.clear();
  spare_ = 0;
  shared_.stream_heaps.fetch_sub(static_cast<int>(stream_heaps_.size()), std::memory_order_relaxed);
  stream_heaps_.clear();
  pool_.abandon();
  fences_.abandon();
  events_.discard();  // a new generation begins only when nothing of the old one is left
  clean_ = pool_.make_heap(Order::clean);
  pending_ = pool_.make_heap(Order::pending);
  promised_ = 0;
  growing_ = 0;
  initial_done_ = false;
  pressure_ = false;
  broken_.store(0, std::memory_order_relaxed);
  fill_stream_.store(nullptr, std::memory_order_relaxed);
  async_.discard();
  alive_.store(false, std::memory_order_release);
  shared_.handle_epoch.fetch_add(1, std::memory_order_release);
}

// ---- giving memory back ------------------------------------------------------------------------------------------

std::uint64_t Context::release_unused(std::uint64_t keep) {
  // The real cuMemFree waits for the context: only where a fresh fence says that there is nothing to wait for, so that
  // a kernel that runs for ever cannot hang us (contract §6).
  if (shared_.gate.may_be_open() || closing_.load(std::memory_order_relaxed) != 0) return 0;
  RelaxedCaptureMode relaxed(driver());
  Fence fence;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    if (pool_.free_bytes() == 0) return 0;
    generation = events_.generation();
    fence.stamp = fences_.stamp();
  }
  if (context_fences()) {
    if (!record_fence(fence)) return 0;
    const bool idle = is_complete(fence.events);
    for (FenceEvent& event : fence.events) event.release();
    if (!idle) return 0;
  } else {
    poll_streams();
    if (!streams_idle()) return 0;
  }
  std::vector<CUdeviceptr> back;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return 0;
    if (context_fences()) fences_.completed(fence.stamp);
    back = detach_unused(keep);
  }
  return give_back(back, generation);
}

std::vector<CUdeviceptr> Context::detach_unused(std::uint64_t keep) {
  clean_up();
  std::vector<CUdeviceptr> back;
  std::uint64_t bytes = 0;
  for (Segment* segment = pool_.segments(); segment != nullptr && pool_.unused() > keep;) {
    Segment* next = segment->next;
    const Block* block = Pool::wholly_free(*segment);
    if (block != nullptr && block->heap == clean_->index) {
      back.push_back(segment->address());
      bytes += segment->size();
      pool_.remove(segment);
    }
    segment = next;
  }
  usage_.held.subtract(bytes);
  if (bytes != 0) pressure_ = false;
  return back;
}

std::uint64_t Context::give_back(const std::vector<CUdeviceptr>& segments, std::uint64_t generation) noexcept {
  if (segments.empty() || generation != events_.generation()) return 0;
  RelaxedCaptureMode relaxed(driver());
  for (CUdeviceptr address : segments) note(driver().call(driver().cuMemFree_v2, address));
  count(shared_.counters.releases, segments.size());
  log::debug("device {}: {} segments went back to the driver", device_, segments.size());
  return segments.size();
}

std::uint64_t Context::relieve(std::uint64_t patience_ns) {
  poll();
  std::uint64_t released = release_unused(0);
  const std::uint64_t deadline = monotonic_ns() + patience_ns;
  const std::uint64_t start = ticks();
  bool waited = false;
  while (released == 0 && !shared_.gate.may_be_open() && broken() == CUDA_SUCCESS && monotonic_ns() < deadline) {
    {
      std::lock_guard lock(mutex_);
      if (pool_.unused() == 0 && newest_free() == 0 && evented_.empty()) break;  // waiting would free nothing
    }
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

std::uint64_t Context::unused() noexcept {
  std::lock_guard lock(mutex_);
  clean_up();
  return pool_.unused();
}

}  // namespace cushion
