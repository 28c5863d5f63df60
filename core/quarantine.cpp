#include "core/quarantine.h"

#include <algorithm>
#include <vector>

#include "core/context.h"

namespace cushion {

Quarantine::Quarantine(Shared& shared, Context& context) noexcept
    : shared_(shared), context_(context), most_(shared.options->quarantine.of(context.device_bytes())) {}

std::uint64_t Quarantine::bytes() const noexcept {
  std::lock_guard lock(mutex_);
  return bytes_;
}

Quarantine::Filled Quarantine::fill(Held& held, const StreamIdentity* stream, bool waited) noexcept {
  if (!context_.may_submit()) return Filled::no;
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  held.filled = {&events_, events_.generation(), events_.take(driver(), context_.handle())};
  if (held.filled.event == nullptr) return Filled::no;
  const auto on_stream = [&](CUstream on) {
    if (!context_.note(context_.on_stream(on, [&](CUstream s) {
          return driver().call(driver().cuMemsetD8Async, CUdeviceptr{held.freed.address}, kPattern,
                               static_cast<std::size_t>(held.size), s);
        })))
      return Filled::no;
    return context_.note(context_.on_stream(
               on, [&](CUstream s) { return driver().call(driver().cuEventRecord, held.filled.event, s); }))
               ? Filled::yes
               : Filled::unordered;
  };
  Filled filled = Filled::no;
  if (stream != nullptr) {
    filled = on_stream(stream->handle);
  } else {
    const bool fences = context_.context_fences();
    CUstream own = context_.own_stream(waited ? Context::Own::fill : Context::Own::behind_all);
    if (own != nullptr &&
        (waited ? fences || !shared_.peers.load(std::memory_order_relaxed) : context_.order_after_all(own)))
      filled = on_stream(own);
    // What is short of memory next need not wait for it then. And without fences of the context only the program's
    // streams are asked whether they are complete.
    if (waited && filled != Filled::no && !context_.note(driver().call(driver().cuStreamSynchronize, own)))
      filled = Filled::lost;
  }
  if (filled != Filled::yes) held.filled.release();
  return filled;
}

void Quarantine::add(const Held& held) noexcept {
  try {
    std::lock_guard lock(mutex_);
    held_.push_back(held);
    bytes_ += held.size;
  } catch (...) {  // no host memory to remember it by
    Held gone = held;
    count(shared_.counters.quarantine_skipped);
    release(gone);
  }
  let_go(most_, 2 * most_);
}

bool Quarantine::empty() noexcept { return let_go(0, 0); }

bool Quarantine::let_go(std::uint64_t keep, std::uint64_t most_unlooked) noexcept {
  for (bool any = false;; any = true) {
    Held held;
    std::uint64_t all = 0;
    {
      std::lock_guard lock(mutex_);
      all = bytes_;
      if (held_.empty() || all <= keep) return any;
      held = held_.front();
      held_.pop_front();
      bytes_ -= held.size;
    }
    CUresult filled = CUDA_ERROR_NOT_READY;
    if (context_.may_submit()) {
      RelaxedCaptureMode relaxed(driver());
      filled = held.filled.query(driver());
      if (filled != CUDA_ERROR_NOT_READY) context_.note(filled);
    }
    if (filled != CUDA_SUCCESS && all <= most_unlooked) {
      try {
        std::lock_guard lock(mutex_);
        held_.push_front(held);
        bytes_ += held.size;
        return any;
      } catch (...) {  // no host memory
      }
    }
    if (filled != CUDA_SUCCESS || !look(held)) count(shared_.counters.quarantine_skipped);
    release(held);
  }
}

bool Quarantine::look(const Held& held) noexcept try {
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
  std::vector<unsigned char> seen(std::min(held.size, kPiece));
  Overwritten found{held.freed, 0, 0};
  RelaxedCaptureMode relaxed(driver());
  CurrentContext current(driver(), context_.handle());
  for (std::uint64_t at = 0; at < held.size; at += kPiece) {
    const std::uint64_t piece = std::min(kPiece, held.size - at);
    // A reset meanwhile: these may be another's bytes.
    const auto ours = [&] { return context_.may_submit() && held.generation == held.arena->generation(); };
    if (!ours() || !context_.read_back(held.freed.address + at, seen.data(), piece) || !ours()) return false;
    found.differs(seen.data(), piece, kPattern, at);
  }
  if (found.count == 0) return true;
  count(shared_.counters.quarantine_overwritten);
  shared_.misuse.written_after_free(shared_.stacks, found);
  return true;
} catch (...) {  // no host memory
  return false;
}

void Quarantine::release(Held& held) noexcept {
  held.filled.release();
  context_.release(held);
}

void Quarantine::discard() noexcept {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  events_.discard();
  held_.clear();
  bytes_ = 0;
}

}  // namespace cushion
