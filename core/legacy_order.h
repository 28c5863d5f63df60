// Legacy order: what a stream-ordered call would have left on its stream.
//
// Natively cudaMallocAsync and cudaFreeAsync on a blocking stream come after the legacy stream's earlier work
// (measured: synchronising the stream then waits for a kernel on the legacy one). Cushion puts nothing on the stream,
// so that a program that synchronises it next, or asks it, would not find that order. Such a stream is remembered here,
// and gets a mark, an event that nobody waits for, before it is synchronised or asked. Kernels, copies and events that
// the program puts on it need none: they wait for the legacy stream by themselves.
//
// Invariant: the mark is put before later kernels are launched on the legacy stream: it must not come after work that
// the native call would not wait for, and that may wait for the host. (Later copies and fills there it may come after.)
//
// Thread safe; its lock is a leaf. Cost: a load for who only looks whether there are any; otherwise a lock and, for a
// mark, cuEventRecord (0.4 µs), once between two synchronisations of the stream.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cushion {

class Context;
class Lane;

class LegacyOrder {
 public:
  struct Owed {
    CUstream stream;
    long owner_thread;  // of a per-thread stream, which no other thread can name; else 0
    Context* context;
    Lane* lane;
  };

  bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }
  void add(const Owed& owed) {
    std::lock_guard lock(mutex_);
    if (owed_ == nullptr) owed_ = new std::vector<Owed>;
    owed_->push_back(owed);
    count_.store(static_cast<int>(owed_->size()), std::memory_order_release);
  }
  // Takes out those of which wanted() is true, one at a time; nothing if there is none.
  template <class Wanted>
  std::optional<Owed> take(Wanted wanted) noexcept {
    std::lock_guard lock(mutex_);
    if (owed_ == nullptr) return std::nullopt;
    const auto found = std::find_if(owed_->begin(), owed_->end(), wanted);
    if (found == owed_->end()) return std::nullopt;
    const Owed owed = *found;
    *found = owed_->back();
    owed_->pop_back();
    count_.store(static_cast<int>(owed_->size()), std::memory_order_release);
    return owed;
  }

 private:
  std::atomic<int> count_{0};          // *owed_'s size, readable without the lock
  std::mutex mutex_;                   // protects *owed_
  std::vector<Owed>* owed_ = nullptr;  // never destroyed
};

}  // namespace cushion
