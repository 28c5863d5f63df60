// Single order: whether a cudaFree may return before its wait is over, with nobody able to tell (CUSHION_FREE=auto,
// contract §3).
//
// It may while everything that the device does for this process has one order, and the host cannot watch it:
//   one order   one context; no stream but the legacy one, whoever made it; one thread that has a context current (its
//               own per-thread stream and the legacy one wait for each other, two threads' do not); no peer, no green
//               context, no graph, nothing shared with other processes or interfaces
//   unwatched   no pinned, registered, managed or mapped memory, no pageable access; no host functions; no kernel that
//               prints: once one was launched, the driver refuses to set the size of its buffer (measured, H200,
//               580.159: 0.2 µs a question)
// Then work submitted after a free comes after what the free would have waited for, and a freed block may be handed out
// again at once.
//
// Invariant: while the order holds, the wait of the last free is owed: an event was recorded inside it. Whoever asks
// how far the device is (event and stream queries, elapsed times) pays first: waits for that event. So does every call
// that may end the order, before it reaches the driver; once ended it never comes back, and every cudaFree waits as
// under `sync`. Of a free and a call on another thread that ends the order, one sees the other: the free records, sets
// `owed_`, then looks at `ended_by_`; the other sets `ended_by_`, then looks at `owed_`; all four sequentially
// consistent.
//
// Thread safe. Cost: owe() about 0.5 µs, everything else one load while nothing is owed.
#pragma once

#include <cuda.h>

#include <atomic>
#include <mutex>

#include "core/capture.h"
#include "core/driver.h"
#include "core/fence.h"
#include "core/mutation.h"

namespace cushion {

class SingleOrder {
 public:
  bool holds() const noexcept { return ended_by() == nullptr; }
  // What ended it, a string that lasts for ever; null while it holds.
  const char* ended_by() const noexcept { return ended_by_.load(std::memory_order_seq_cst); }

  // Before the call that may end it reaches the driver.
  void end(const Driver& driver, const char* why) noexcept {
    const char* holding = nullptr;
    if (mutated(Mutation::order_never_ends)) return;
    ended_by_.compare_exchange_strong(holding, why, std::memory_order_seq_cst);
    pay(driver);
  }
  // The thread makes a context current.
  void thread_comes(const Driver& driver, long id) noexcept {
    long first = 0;
    if (thread_.compare_exchange_strong(first, id, std::memory_order_relaxed) || first == id) return;
    if (holds()) end(driver, "a second thread");
  }
  void device_comes(const Driver& driver, CUdevice device) noexcept {
    int first = kNoDevice;
    if (device_.compare_exchange_strong(first, device, std::memory_order_relaxed) || first == device) return;
    if (holds()) end(driver, "a second device");
  }

  // Inside a free in `context`, which is current: true if it may return, its wait owed. False: it must wait itself.
  bool owe(const Driver& driver, CaptureGate& gate, CUcontext context, EventPool& events) noexcept;
  // Waits for what is owed, if anything is.
  void pay(const Driver& driver) noexcept {
    if (owed_.load(std::memory_order_seq_cst) && !mutated(Mutation::owed_wait_is_forgotten)) [[unlikely]]
      wait(driver);
  }
  // The context was reset: its work is over, its events are gone.
  void forget() noexcept {
    std::lock_guard lock(mutex_);
    event_ = {};
    owed_.store(false, std::memory_order_seq_cst);
  }

 private:
  static constexpr int kNoDevice = -1;
  void wait(const Driver& driver) noexcept;
  static bool may_print(const Driver& driver) noexcept;

  std::atomic<const char*> ended_by_{nullptr};
  std::atomic<bool> owed_{false};
  std::atomic<long> thread_{0};  // the first that made a context current; 0: none yet
  std::atomic<int> device_{kNoDevice};
  std::mutex mutex_;    // protects what follows; a leaf, not held while waiting
  FenceEvent event_{};  // inside the last free; recorded again by the next, unless somebody waits for it
  int waiting_ = 0;     // threads
};

}  // namespace cushion
