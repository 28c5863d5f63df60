#include "core/fence.h"

namespace cushion {

CUevent EventPool::take(const Driver& driver, CUcontext context) noexcept {
  if (generation() == kFirst) {
    if (CUevent event = hot_.exchange(nullptr, std::memory_order_acq_rel)) return event;
  }
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      CUevent event = spare_.back();
      spare_.pop_back();
      return event;
    }
  }
  CurrentContext current(driver, context);
  if (current.result() != CUDA_SUCCESS) return nullptr;
  CUevent event = nullptr;
  if (driver.call(driver.cuEventCreate, &event, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING)) != CUDA_SUCCESS)
    return nullptr;
  return event;
}

void EventPool::put(CUevent event, std::uint64_t generation) noexcept {
  if (generation != generation_.load(std::memory_order_acquire)) return;
  CUevent none = nullptr;
  if (generation == kFirst && hot_.compare_exchange_strong(none, event, std::memory_order_acq_rel)) return;
  std::lock_guard lock(mutex_);
  if (generation != generation_.load(std::memory_order_relaxed)) return;
  try {
    spare_.push_back(event);
  } catch (...) {  // no host memory to remember it by: the event is lost until its context ends
  }
}

void EventPool::discard() noexcept {
  std::lock_guard lock(mutex_);
  spare_.clear();
  generation_.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace cushion
