#include "shim/helper.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "shim/hooks.h"
#include "shim/process.h"

namespace cushion {
namespace {

void* answer_requests(void* of) {
  Runtime& runtime = *static_cast<Runtime*>(of);
  ControlPage& page = *runtime.shared().page;
  const bool has_metrics = !runtime.program().metrics.empty();
  const std::uint64_t idle = runtime.options().idle_release.ns;
  std::uint64_t pause = idle != 0 ? std::max(idle / 2, std::uint64_t{10'000'000}) : Runtime::kMetricsAge;
  if (has_metrics) pause = std::min(pause, Runtime::kMetricsAge);
  const timespec interval{static_cast<time_t>(pause / 1'000'000'000), static_cast<long>(pause % 1'000'000'000)};
  for (;;) {
    // Acquire, and before the answer: a ring that comes while answering is seen by the wait.
    const std::uint32_t rung = page.doorbell.load(std::memory_order_acquire);
    if (serving() != nullptr) runtime.in_background();
    syscall(SYS_futex, &page.doorbell, FUTEX_WAIT, rung, has_metrics || idle != 0 ? &interval : nullptr, nullptr, 0);
    if (has_metrics) page.word.fetch_or(ControlPage::kAttention, std::memory_order_relaxed);
  }
  return nullptr;
}

}  // namespace

bool start_helper(Runtime& runtime) noexcept {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, std::size_t{1} << 20);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the thread begins with ours
  pthread_t thread{};
  const bool started = pthread_create(&thread, &attributes, answer_requests, &runtime) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (started) pthread_setname_np(thread, "cushion");
  return started;
}

}  // namespace cushion
