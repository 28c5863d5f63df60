// Streams: the set of streams that the program has created, by context. Kept only for drivers without
// cuCtxRecordEvent (before 12.5), where a context is known idle when each of its streams answers so.
#pragma once

#include <cuda.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace cushion {

class StreamSet {
 public:
  void add(CUstream stream, CUcontext context) {
    std::lock_guard lock(mutex_);
    if (streams_ == nullptr) streams_ = new std::unordered_map<CUstream, CUcontext>;
    (*streams_)[stream] = context;
  }
  void remove(CUstream stream) noexcept {
    std::lock_guard lock(mutex_);
    if (streams_ != nullptr) streams_->erase(stream);
  }

  void remove_all(CUcontext context) noexcept {
    std::lock_guard lock(mutex_);
    if (streams_ != nullptr) std::erase_if(*streams_, [&](const auto& entry) { return entry.second == context; });
  }

  // Some stream could not be noted, or is known to one thread only (a per-thread stream): from then on the set is
  // incomplete for good.
  void lose() noexcept { complete_.store(false, std::memory_order_relaxed); }
  bool complete() const noexcept { return complete_.load(std::memory_order_relaxed); }

  // Whether ask(stream) is true of every stream of `context`. The lock is held across `ask`, so that no stream is
  // destroyed under the question (the destroy hook removes it first): `ask` must not block.
  template <class Ask>
  bool all_of(CUcontext context, Ask ask) noexcept {
    std::lock_guard lock(mutex_);
    if (streams_ == nullptr) return true;
    for (const auto& [stream, owner] : *streams_) {
      if (owner == context && !ask(stream)) return false;
    }
    return true;
  }

 private:
  std::mutex mutex_;                                            // protects *streams_
  std::unordered_map<CUstream, CUcontext>* streams_ = nullptr;  // never destroyed
  std::atomic<bool> complete_{true};
};

}  // namespace cushion
