#include "core/capture.h"

#include <algorithm>

namespace cushion {

void CaptureGate::begun(CUstream stream, CUcontext context, long thread, bool success) noexcept {
  if (success) {
    const Open open{stream, context, is_per_thread(stream) ? thread : 0};
    try {
      std::lock_guard lock(mutex_);
      open_.push_back(open);
      return;  // `closed_` keeps this beginner's count for the open capture
    } catch (...) {
      return;  // no host memory to remember it by: the gate stays closed, which is safe and only slow
    }
  }
  closed_.fetch_sub(1, std::memory_order_seq_cst);
}

void CaptureGate::refresh(const Driver& driver, long thread) noexcept {
  if (!may_be_open() || driver.cuStreamIsCapturing == nullptr) return;
  std::lock_guard lock(mutex_);
  const auto over = [&](const Open& open) {
    if (open.thread != 0 && open.thread != thread) return false;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return driver.call(driver.cuStreamIsCapturing, open.stream, &status) == CUDA_SUCCESS &&
           status == CU_STREAM_CAPTURE_STATUS_NONE;
  };
  const auto gone = std::erase_if(open_, over);
  closed_.fetch_sub(static_cast<int>(gone), std::memory_order_seq_cst);
}

void CaptureGate::forget(CUstream stream, long thread) noexcept {
  if (!may_be_open()) return;
  std::lock_guard lock(mutex_);
  const auto gone = std::erase_if(open_, [&](const Open& open) { return same(open, stream, thread); });
  closed_.fetch_sub(static_cast<int>(gone), std::memory_order_seq_cst);
}

void CaptureGate::forget(CUcontext context) noexcept {
  if (!may_be_open()) return;
  std::lock_guard lock(mutex_);
  const auto gone = std::erase_if(open_, [&](const Open& open) { return open.context == context; });
  closed_.fetch_sub(static_cast<int>(gone), std::memory_order_seq_cst);
}

CUresult CaptureGate::ask(const Driver& driver, CUstream stream, bool& capturing) const noexcept {
  capturing = false;
  // The legacy stream cannot be captured, and asking it while a blocking stream captures invalidates that capture.
  if (is_legacy(stream) || driver.cuStreamIsCapturing == nullptr) return CUDA_SUCCESS;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver.call(driver.cuStreamIsCapturing, stream, &status);
  capturing = status != CU_STREAM_CAPTURE_STATUS_NONE;
  return result;
}

}  // namespace cushion
