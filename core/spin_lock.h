// Spin lock: for a few dozen instructions at a time, taken by one thread nearly always; no call is made under it that
// can block. One atomic exchange and one store, about 5 ns uncontended: half of a std::mutex, whose second exchange
// would wait for every store made under it. A waiter gives its processor away after a short while and sleeps after a
// longer one, so that a holder that lost its processor, to a real-time thread even, can go on.
//
// Taking it is sequentially consistent, not only an acquire: what this thread did before (work that it submitted to the
// device) is visible to everybody before anything that it reads under the lock. Fences build on that (fence.h).
#pragma once

#include <sched.h>

#include <atomic>
#include <ctime>

namespace cushion {

// Between two looks at what another thread is about to do.
inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class SpinLock {
 public:
  [[gnu::always_inline]] void lock() noexcept {
    if (!try_lock()) [[unlikely]]
      wait_for_it();
  }
  bool try_lock() noexcept { return !locked_.exchange(true, std::memory_order_seq_cst); }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  [[gnu::noinline]] void wait_for_it() noexcept {
    for (int tries = 0; !try_lock(); ++tries) wait(tries);
  }
  void wait(int tries) const noexcept {
    for (int i = 0; i < kSpins; ++i) {
      if (!locked_.load(std::memory_order_relaxed)) return;
      pause();
    }
    if (tries < kYields) {
      sched_yield();
    } else {
      const timespec moment{0, 50'000};
      nanosleep(&moment, nullptr);
    }
  }
  static constexpr int kSpins = 64;
  static constexpr int kYields = 64;
  std::atomic<bool> locked_{false};
};

}  // namespace cushion
