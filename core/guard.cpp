#include "core/guard.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/context.h"
#include "core/slab.h"

namespace cushion {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{256} << 10;      // pinned at a time, at least
constexpr std::uint64_t kMostPinned = std::uint64_t{64} << 20;  // in all
constexpr std::size_t kReady = 64;                              // guards, unless they are large

}  // namespace

FenceEvent Guard::record(CUstream stream) noexcept {
  FenceEvent event{&events_, events_.generation(), events_.take(driver(), context_.handle())};
  if (event.event != nullptr && !context_.note(context_.on_stream(stream, [&](CUstream s) {
        return driver().call(driver().cuEventRecord, event.event, s);
      }))) {
    event.release();
    event.event = nullptr;
  }
  return event;
}

bool Guard::take(std::uint64_t address, Filled& filled) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = filled_.find(address);
  if (found == filled_.end()) return false;
  filled = found->second;
  filled_.erase(found);
  return true;
}

bool Guard::set(std::uint64_t address, std::uint64_t requested, const StreamIdentity* stream) noexcept {
  Filled filled;
  if (take(address, filled) && filled.event.event != nullptr) filled.event.release();  // of a reset context
  filled = {};
  if (!context_.may_submit()) return true;
  const std::uint64_t generation = events_.generation();
  pin_more();
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  const auto fill = [&](CUstream s) {
    return driver().call(driver().cuMemsetD8Async, address + requested, kPattern, static_cast<std::size_t>(bytes_), s);
  };
  if (stream != nullptr) {
    if (!context_.note(context_.on_stream(stream->handle, fill))) return true;
    filled = {stream->id, record(stream->handle)};
  } else {
    CUstream own = context_.own_stream(Context::Own::fill);
    if (own == nullptr || !context_.note(fill(own))) return true;
    if (!context_.note(driver().call(driver().cuStreamSynchronize, own))) return false;
  }
  try {
    std::lock_guard lock(mutex_);
    if (generation == events_.generation()) filled_.insert_or_assign(address, filled);
  } catch (...) {  // no host memory to remember it by: it has no guard then
    if (filled.event.event != nullptr) filled.event.release();
  }
  return true;
}

void Guard::skip(std::uint64_t address) noexcept {
  Filled filled;
  if (!take(address, filled)) return;
  if (filled.event.event != nullptr) filled.event.release();
  count(shared_.counters.guards_skipped);
}

void Guard::check(const FreedBlock& block, const StreamIdentity* stream, bool waited) noexcept {
  Filled filled;
  if (!take(block.address, filled)) return;
  bool looked = false;
  if (context_.may_submit()) {
    poll();
    RelaxedCaptureMode relaxed(driver());
    CurrentContext current(driver(), context_.handle());
    try {
      looked = stream == nullptr && waited ? look_now(block) : copy(block, stream, filled);
    } catch (...) {  // no host memory
    }
  }
  if (filled.event.event != nullptr) filled.event.release();
  if (!looked) count(shared_.counters.guards_skipped);
}

// All that could use the guard is complete.
bool Guard::look_now(const FreedBlock& block) noexcept try {
  const std::uint64_t generation = events_.generation();
  std::vector<unsigned char> seen(bytes_);
  if (!context_.read_back(block.address + block.bytes, seen.data(), bytes_)) return false;
  // A reset meanwhile: these may be another's bytes.
  if (!context_.serves() || generation != events_.generation()) return false;
  Overwritten found{block, 0, 0};
  if (!found.differs(seen.data(), bytes_, kPattern)) return true;
  found.block.freed = shared_.stacks.take(0);
  tell({found});
  return true;
} catch (...) {  // no host memory
  return false;
}

bool Guard::copy(const FreedBlock& block, const StreamIdentity* stream, const Filled& filled) {
  const std::uint64_t generation = events_.generation();
  CUstream on = stream != nullptr ? stream->handle : context_.own_stream(Context::Own::behind_all);
  if (stream == nullptr && (on == nullptr || !context_.order_after_all(on))) return false;
  if (stream != nullptr && filled.stream != 0 && filled.stream != stream->id) {
    if (filled.event.event == nullptr || filled.event.generation != generation ||
        !context_.note(context_.on_stream(
            on, [&](CUstream s) { return driver().call(driver().cuStreamWaitEvent, s, filled.event.event, 0u); })))
      return false;
  }
  Copied copied{0, pinned(), {}, block};
  if (copied.bytes == nullptr) return false;
  copied.block.freed = shared_.stacks.take(0);
  const bool issued = context_.note(context_.on_stream(on, [&](CUstream s) {
    return driver().call(driver().cuMemcpyDtoHAsync_v2, static_cast<void*>(copied.bytes), block.address + block.bytes,
                         static_cast<std::size_t>(bytes_), s);
  }));
  if (issued) copied.event = record(on);
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return false;  // reset meanwhile: the pinned memory went along
  if (!issued) {
    spare_.push_back(copied.bytes);  // there is room: it was taken from there
    return false;
  }
  copied.id = ++last_id_;
  copied_.push_back(copied);
  return true;
}

unsigned char* Guard::pinned() {
  std::lock_guard lock(mutex_);
  copied_.reserve(copied_.size() + 1);
  if (spare_.empty()) return nullptr;
  unsigned char* bytes = spare_.back();
  spare_.pop_back();
  return bytes;
}

// Inside an allocation, so that no free asks the driver for memory.
void Guard::pin_more() noexcept try {
  const std::uint64_t size = round_up(bytes_, 64);
  const std::uint64_t piece = round_up(std::max(kPiece, 4 * size), 4096);
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    if (spare_.size() >= std::min<std::uint64_t>(kReady, piece / size) || pinned_bytes_ + piece > kMostPinned) return;
    pinned_bytes_ += piece;
    generation = events_.generation();
  }
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  auto* pages = static_cast<unsigned char*>(map_pages(piece));
  if (pages == nullptr || !context_.note(current.result()) ||
      !context_.note(driver().call(driver().cuMemHostRegister_v2, static_cast<void*>(pages),
                                   static_cast<std::size_t>(piece), 0u))) {
    if (pages != nullptr) munmap(pages, piece);
    return;  // and not asked again: pinned_bytes_ has counted it
  }
  std::memset(pages, kPattern, piece);
  std::lock_guard lock(mutex_);
  if (generation != events_.generation()) return;
  spare_.reserve(pinned_bytes_ / size);  // for all that there are
  for (std::uint64_t at = 0; at + size <= piece; at += size) spare_.push_back(pages + at);
} catch (...) {  // no host memory
}

bool Guard::look_at(const Copied& copied, Overwritten& found) noexcept {
  found = {copied.block, 0, 0};
  if (!found.differs(copied.bytes, bytes_, kPattern)) return false;
  std::memset(copied.bytes, kPattern, bytes_);
  return true;
}

void Guard::poll() noexcept try {
  struct Asked {
    std::uint64_t id;
    FenceEvent event;
    CUresult answer;
  };
  std::vector<Asked> asked;
  std::uint64_t generation = 0;
  {
    std::lock_guard lock(mutex_);
    if (copied_.empty()) return;
    generation = events_.generation();
    for (const Copied& copied : copied_) {
      if (copied.event.event != nullptr) asked.push_back({copied.id, copied.event, CUDA_ERROR_NOT_READY});
    }
  }
  {
    RelaxedCaptureMode relaxed(driver());
    for (Asked& one : asked) one.answer = one.event.query(driver());
  }
  std::vector<Overwritten> found;
  {
    std::lock_guard lock(mutex_);
    if (generation != events_.generation()) return;
    found.reserve(asked.size());
    for (const Asked& one : asked) {
      const auto at =
          std::find_if(copied_.begin(), copied_.end(), [&](const Copied& copied) { return copied.id == one.id; });
      if (one.answer == CUDA_ERROR_NOT_READY || at == copied_.end()) continue;  // or another thread was first
      Overwritten overwritten;
      if (look_at(*at, overwritten)) found.push_back(overwritten);
      if (one.answer == CUDA_SUCCESS) {
        spare_.push_back(at->bytes);
      } else {  // nothing says when the copy is over: its memory is not used again
        count(shared_.counters.guards_skipped);
      }
      at->event.release();
      copied_.erase(at);
    }
  }
  for (const Asked& one : asked) {
    if (one.answer != CUDA_ERROR_NOT_READY) context_.note(one.answer);
  }
  tell(found);
} catch (...) {  // no host memory
}

void Guard::finish(Patience patience) noexcept try {
  std::vector<Overwritten> found;
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!lock_within(lock, patience)) return;
    found.reserve(copied_.size());
    for (const Copied& copied : copied_) {
      Overwritten overwritten;
      if (look_at(copied, overwritten)) found.push_back(overwritten);
    }
    copied_.clear();  // and the copies' memory is not used again
  }
  tell(found);
} catch (...) {  // no host memory
}

// The pages stay: a destroyed stream's copy may still be on its way.
void Guard::discard() noexcept {
  if (bytes_ == 0) return;
  finish(Patience::some);
  std::lock_guard lock(mutex_);
  events_.discard();
  filled_.clear();
  spare_.clear();
  copied_.clear();
  pinned_bytes_ = 0;
}

void Guard::tell(const std::vector<Overwritten>& found) noexcept {
  for (const Overwritten& one : found) {
    count(shared_.counters.guards_overwritten);
    shared_.misuse.overwritten_guard(shared_.stacks, one, bytes_);
  }
}

}  // namespace cushion
