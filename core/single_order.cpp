#include "core/single_order.h"

namespace cushion {

// A kernel that prints has been launched: then the driver refuses to set the size of the buffer. An error of any other
// kind proves nothing either.
bool SingleOrder::may_print(const Driver& driver) noexcept {
  std::size_t size = 0;
  return driver.call(driver.cuCtxGetLimit, &size, CU_LIMIT_PRINTF_FIFO_SIZE) != CUDA_SUCCESS ||
         driver.call(driver.cuCtxSetLimit, CU_LIMIT_PRINTF_FIFO_SIZE, size) != CUDA_SUCCESS;
}

bool SingleOrder::owe(const Driver& driver, CaptureGate& gate, CUcontext context, EventPool& events) noexcept {
  if (!holds()) return false;
  if (may_print(driver)) {
    end(driver, "a kernel that prints");
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    if (waiting_ != 0) return false;  // its event is in use: the order has just ended
    if (event_.event == nullptr || event_.generation != events.generation())
      event_ = {&events, events.generation(), events.take(driver, context)};
    if (event_.event == nullptr || !gate.enter()) return false;
    const CUresult recorded = driver.call(driver.cuCtxRecordEvent, context, event_.event);
    gate.leave();
    if (recorded != CUDA_SUCCESS) return false;
    owed_.store(true, std::memory_order_seq_cst);
  }
  if (!holds()) pay(driver);
  return true;
}

void SingleOrder::wait(const Driver& driver) noexcept {
  FenceEvent event;
  {
    std::lock_guard lock(mutex_);
    if (!owed_.load(std::memory_order_relaxed)) return;
    event = event_;
    ++waiting_;
  }
  // An error is the context's: whatever the program calls next answers it.
  driver.call(driver.cuEventSynchronize, event.event);
  std::lock_guard lock(mutex_);
  if (--waiting_ == 0 && event_.event == event.event) owed_.store(false, std::memory_order_seq_cst);
}

}  // namespace cushion
