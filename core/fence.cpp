#include "core/fence.h"

namespace cushion {

CUevent EventPool::take(const Driver& driver, CUcontext context) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      CUevent event = spare_.back();
      spare_.pop_back();
      return event;
    }
  }
  CurrentContext current(driver, context);
  CUevent event = nullptr;
  if (driver.call(driver.cuEventCreate, &event, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING)) != CUDA_SUCCESS)
    return nullptr;
  return event;
}

void EventPool::put(CUevent event, std::uint64_t generation) noexcept {
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
  generation_.fetch_add(1, std::memory_order_release);
}

}  // namespace cushion
