#include "core/async.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/context.h"
#include "core/log.h"

namespace cushion {
namespace {

constexpr std::uint64_t kMoment = 10'000'000;  // ns; more than an idle device takes for what has nothing to wait for

}  // namespace

CUmemoryPool AsyncAllocator::prepare() noexcept {
  CUmemoryPool pool = pool_.load(std::memory_order_acquire);
  if (pool != nullptr || !context_.primary() || shared_.gate.may_be_open()) return pool;
  RelaxedCaptureMode relaxed(driver());
  if (!context_.note(driver().call(driver().cuDeviceGetDefaultMemPool, &pool, context_.device()))) return nullptr;
  const Size& wanted = shared_.options->release_threshold;
  cuuint64_t threshold = 0;
  if (context_.note(driver().call(driver().cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                  static_cast<void*>(&threshold))) &&
      threshold == 0) {
    threshold = wanted.percent >= 100 ? UINT64_MAX : wanted.of(context_.device_bytes());
    context_.note(driver().call(driver().cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                static_cast<void*>(&threshold)));
  }
  pool_.store(pool, std::memory_order_release);
  return pool;
}

CUstream AsyncAllocator::open(std::atomic<CUstream>& slot, std::uint64_t generation) noexcept {
  CUstream stream = slot.load(std::memory_order_acquire);
  if (stream != nullptr) return stream;
  stream = idle_again(generation);
  if (stream == nullptr &&
      !context_.note(driver().call(driver().cuStreamCreate, &stream, static_cast<unsigned>(CU_STREAM_NON_BLOCKING))))
    return nullptr;
  CUstream first = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return nullptr;  // reset meanwhile: it went along
    if (slot.compare_exchange_strong(first, stream, std::memory_order_acq_rel)) return stream;
  }
  leave(stream, generation);  // another thread was first
  return first;
}

// The one that was left first; if it is still busy it goes behind the others.
CUstream AsyncAllocator::idle_again(std::uint64_t generation) noexcept {
  CUstream stream = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (left_.empty() || generation != events_.generation()) return nullptr;
    stream = left_.front();
    left_.erase(left_.begin());
  }
  const CUresult result = driver().call(driver().cuStreamQuery, stream);
  if (result == CUDA_SUCCESS) return stream;
  if (result != CUDA_ERROR_NOT_READY) context_.note(result);
  leave(stream, generation);
  return nullptr;
}

void AsyncAllocator::leave(CUstream stream, std::uint64_t generation) noexcept try {
  std::lock_guard lock(mutex_);
  if (generation == events_.generation()) left_.push_back(stream);
} catch (...) {  // no host memory to remember it by: it is lost until its context ends
}

bool AsyncAllocator::allocate(std::uint64_t bytes, PoolBlock* out) noexcept {
  if (!context_.primary() || !context_.may_submit() || bytes > context_.device_bytes() ||
      shared_.peers.load(std::memory_order_relaxed)) {
    return false;
  }
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  const std::uint64_t generation = events_.generation();
  const CUmemoryPool pool = prepare();
  if (pool == nullptr || !context_.note(current.result())) return false;
  // A block is handed out only when there is a stream to free it on, and a spare for frees that have no fence.
  if (freeing_.load(std::memory_order_acquire) == nullptr) context_.take_spare();
  if (open(freeing_, generation) == nullptr) return false;
  const CUstream stream = open(allocating_, generation);
  if (stream == nullptr) return false;

  const std::uint64_t alignment = bytes > kBigRequest ? kBigAlignment : kUnit;
  CUdeviceptr base = 0;
  CUresult result = CUDA_SUCCESS;
  {
    std::shared_lock submitting(submitting_);
    result = driver().call(driver().cuMemAllocFromPoolAsync, &base, static_cast<std::size_t>(bytes + alignment - kUnit),
                           pool, stream);
  }
  if (generation != events_.generation() || !context_.note(result)) return false;
  const CUdeviceptr address = round_up(base, alignment);
  const bool fits = base % kUnit == 0;  // the driver promises less than cudaMalloc's callers rely on
  const bool ready = fits && make_ready(address, bytes, stream, generation);
  if (ready) {
    *out = {address, base};
  } else {
    keep_unused(base, generation);
    give_back(stream, generation);
  }
  return ready;
}

void AsyncAllocator::keep_unused(CUdeviceptr base, std::uint64_t generation) noexcept try {
  std::lock_guard lock(mutex_);
  if (generation == events_.generation()) unused_.push_back(base);  // else reset: what the address is now is not ours
} catch (...) {  // no host memory to remember it by: it is lost until the pool's end
}

void AsyncAllocator::give_back(CUstream stream, std::uint64_t generation) noexcept {
  std::vector<CUdeviceptr> unused;
  {
    std::lock_guard lock(mutex_);
    if (unused_.empty() || generation != events_.generation()) return;
    unused.swap(unused_);
  }
  for (const CUdeviceptr base : unused) {
    if (!context_.note(driver().call(driver().cuMemFreeAsync, base, stream))) keep_unused(base, generation);
  }
}

bool AsyncAllocator::make_ready(CUdeviceptr address, std::uint64_t bytes, CUstream stream,
                                std::uint64_t generation) noexcept {
  if (shared_.options->init != InitMode::none &&
      !context_.note(driver().call(driver().cuMemsetD8Async, address, fill_byte(shared_.options->init),
                                   static_cast<std::size_t>(bytes), stream))) {
    return false;
  }
  const std::uint64_t filling = shared_.options->init != InitMode::none ? bytes : 0;  // ns: no device fills slower
  const CUresult result = completes(stream, std::max(kMoment, shared_.options->oom_wait.ns) + filling);
  if (result != CUDA_ERROR_NOT_READY) return context_.note(result);
  // It waits for another stream's work. The next allocations get a stream that does not, until this one is idle.
  CUstream stuck = stream;
  if (allocating_.compare_exchange_strong(stuck, nullptr, std::memory_order_acq_rel)) leave(stream, generation);
  return false;
}

CUresult AsyncAllocator::completes(CUstream stream, std::uint64_t patience_ns) noexcept {
  CUresult result = driver().call(driver().cuStreamQuery, stream);
  if (result != CUDA_ERROR_NOT_READY) return result;
  // Other threads go on allocating on it: an event says when this allocation is through.
  FenceEvent event{&events_, events_.generation(), events_.take(driver(), context_.handle())};
  if (event.event == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  constexpr std::uint64_t kShort = 20'000;  // ns: so long a wait is not worth a sleep
  const std::uint64_t begin = monotonic_ns();
  const std::uint64_t start = ticks();
  result = driver().call(driver().cuEventRecord, event.event, stream);
  while (result == CUDA_SUCCESS && (result = event.query(driver())) == CUDA_ERROR_NOT_READY) {
    const std::uint64_t waited = monotonic_ns() - begin;
    if (waited > patience_ns) break;
    waited < kShort ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(10));
    result = CUDA_SUCCESS;
  }
  shared_.count_wait(shared_.counters.memory_waits, ticks() - start);
  event.release();
  return result;
}

bool AsyncAllocator::order_after_all(CUstream stream) noexcept {
  std::shared_lock submitting(submitting_);
  return context_.order_after_all(stream);
}

std::optional<CUresult> AsyncAllocator::free_in_order(CUdeviceptr base) noexcept {
  if (!context_.primary() || !context_.may_submit()) return std::nullopt;
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  const std::uint64_t generation = events_.generation();
  const CUstream stream = context_.note(current.result()) ? open(freeing_, generation) : nullptr;
  if (stream == nullptr || !order_after_all(stream)) return std::nullopt;
  return free_on(stream, base, generation);
}

CUresult AsyncAllocator::free_on(CUstream stream, CUdeviceptr base, std::uint64_t generation) noexcept {
  if (generation != events_.generation()) return CUDA_SUCCESS;  // reset meanwhile: the block is gone
  const CUresult result = driver().call(driver().cuMemFreeAsync, base, stream);
  context_.note(result);
  return result;
}

CUresult AsyncAllocator::free(CUdeviceptr base) noexcept {
  if (context_.broken() != CUDA_SUCCESS) return context_.broken();
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  const std::uint64_t generation = events_.generation();
  CUstream stream = freeing_.load(std::memory_order_acquire);
  if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;  // a reset took the block along
  if (shared_.options->free == FreeMode::deferred) {
    if (const std::optional<CUresult> answer = free_in_order(base)) return *answer;
  }
  const CUresult waited = context_.wait_idle();
  if (waited != CUDA_SUCCESS) return waited;
  // Nothing is left to wait for, and the stream that allocations come from may have the block at once. Peers' work is
  // not waited for, natively neither: the second stream does that.
  const bool peers = shared_.peers.load(std::memory_order_relaxed) && order_after_all(stream);
  const CUstream allocating = allocating_.load(std::memory_order_acquire);
  if (!peers && allocating != nullptr) stream = allocating;
  return free_on(stream, base, generation);
}

void AsyncAllocator::admit(CUdevice device) noexcept {
  const CUmemoryPool pool = pool_.load(std::memory_order_acquire);
  if (pool == nullptr || device == context_.device()) return;
  RelaxedCaptureMode relaxed(driver());
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = driver().call(driver().cuMemPoolSetAccess, pool, &access, std::size_t{1});
  if (result != CUDA_SUCCESS) {
    log::warn("device {}: its pool's memory cannot be made accessible to device {} (error {})", context_.device(),
              device, static_cast<int>(result));
  }
}

bool AsyncAllocator::settle(CUstream stream, std::uint64_t patience_ns) noexcept {
  if (stream == nullptr) return true;
  const std::uint64_t deadline = monotonic_ns() + patience_ns;
  for (;;) {
    if (std::unique_lock alone(submitting_, std::try_to_lock); alone) {
      // An error is no answer: it is asked again, unless the context is broken.
      const CUresult result = driver().call(driver().cuStreamQuery, stream);
      if (context_.note(result) && context_.note(driver().call(driver().cuStreamSynchronize, stream))) return true;
    }
    if (monotonic_ns() >= deadline || context_.broken() != CUDA_SUCCESS) return false;
    std::this_thread::yield();
  }
}

bool AsyncAllocator::settle(std::uint64_t patience_ns) noexcept {
  const bool first = settle(allocating_.load(std::memory_order_acquire), kMoment);
  const bool second = settle(freeing_.load(std::memory_order_acquire), patience_ns);
  return first && second;
}

std::uint64_t AsyncAllocator::figure(CUmemPool_attribute attribute) const noexcept {
  const CUmemoryPool pool = pool_.load(std::memory_order_acquire);
  if (pool == nullptr) return 0;
  cuuint64_t value = 0;
  const CUresult result = driver().call(driver().cuMemPoolGetAttribute, pool, attribute, static_cast<void*>(&value));
  return result == CUDA_SUCCESS ? value : 0;
}

std::uint64_t AsyncAllocator::unused() noexcept {
  if (!context_.may_submit()) return 0;
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  settle(0);
  const std::uint64_t reserved = held();
  return reserved - std::min(reserved, figure(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
}

bool AsyncAllocator::trim_once() noexcept {
  const std::uint64_t before = held();
  if (before == 0) return false;
  driver().call(driver().cuMemPoolTrimTo, pool_.load(std::memory_order_acquire), std::size_t{0});
  return held() < before;
}

bool AsyncAllocator::trim(std::uint64_t patience_ns) noexcept {
  if (!context_.may_submit()) return false;
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  give_back(freeing_.load(std::memory_order_acquire), events_.generation());
  const bool settled = settle(0);
  const bool released = trim_once();
  if (patience_ns == 0 || (released && settled) || held() == 0) return released;
  // What is left may have been freed and be in use still. Which of it that is no figure tells.
  const std::uint64_t start = ticks();
  const bool idle = context_.becomes_idle(patience_ns);
  shared_.count_wait(shared_.counters.memory_waits, ticks() - start);
  return (idle && settle(kMoment) && trim_once()) || released;
}

void AsyncAllocator::discard() noexcept {
  std::lock_guard lock(mutex_);
  events_.discard();
  left_.clear();
  unused_.clear();
  allocating_.store(nullptr, std::memory_order_relaxed);
  freeing_.store(nullptr, std::memory_order_relaxed);
  pool_.store(nullptr, std::memory_order_relaxed);  // a reset may have set its attributes back
}

}  // namespace cushion
