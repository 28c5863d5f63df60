// Spin lock: for a few dozen instructions at a time, taken by one thread nearly always; no call is made under it. One
// atomic exchange and one store, about 5 ns uncontended. A waiter gives its processor away after a short while, so that
// a holder that lost its own can go on.
//
// Taking it is sequentially consistent, not only an acquire: what this thread did before (work that it submitted to the
// device) is visible to everybody before anything that it reads under the lock. Fences build on that (fence.h).
#pragma once

#include <sched.h>

#include <atomic>

namespace cushion {

class SpinLock {
 public:
  void lock() noexcept {
    while (locked_.exchange(true, std::memory_order_seq_cst)) wait();
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  void wait() const noexcept {
    for (int i = 0; i < kSpins; ++i) {
      if (!locked_.load(std::memory_order_relaxed)) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    sched_yield();
  }
  static constexpr int kSpins = 64;
  std::atomic<bool> locked_{false};
};

}  // namespace cushion
