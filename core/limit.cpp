#include "core/limit.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/context.h"
#include "core/shared.h"
#include "core/ticks.h"

namespace cushion {

void Limit::set(const Size& most) noexcept {
  most_ = most;
  on_ = most.percent < 100;
}

std::uint64_t Limit::of(const Size& most, const Driver& driver, int device) noexcept {
  std::size_t total = 0;
  if (driver.call(driver.cuDeviceTotalMem_v2, &total, device) != CUDA_SUCCESS) return ~std::uint64_t{0};
  return std::min<std::uint64_t>(most.of(total), total);
}

std::uint64_t Limit::used(Shared& shared, int device) noexcept {
  std::uint64_t bytes = foreign(device).load(std::memory_order_relaxed);
  shared.for_each_context([&](const Context& context) {
    if (context.device() == device) bytes += context.usage().held.current();
  });
  return bytes;
}

Limit::Claim Limit::claim(Shared& shared, int device, std::uint64_t most, std::uint64_t unit,
                          std::uint64_t least) noexcept {
  if (!on_) return {};
  const std::uint64_t limit = of(most_, shared.driver, device);
  const std::uint64_t deadline = monotonic_ns() + shared.options->oom_wait.ns;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      std::uint64_t& claimed = claimed_[static_cast<std::size_t>(device)];
      const std::uint64_t taken = used(shared, device) + claimed;
      const std::uint64_t bytes = taken < limit ? std::min(most, (limit - taken) / unit * unit) : 0;
      if (bytes >= least) {
        claimed += bytes;
        return {*this, device, bytes};
      }
      if (claimed == 0 || least > limit) return {*this, device, 0};
    }
    if (monotonic_ns() >= deadline) return {*this, device, 0};
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Limit::end(int device, std::uint64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  claimed_[static_cast<std::size_t>(device)] -= bytes;
}

}  // namespace cushion
