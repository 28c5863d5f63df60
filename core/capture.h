// Capture gate: whether a stream capture is open anywhere in the process, known without a race.
//
// Invariant: cuCtxRecordEvent is never called while a capture is open (it would invalidate it, contract §4). The
// gate is held shared around that call, and around touching the legacy stream; never around anything that blocks, and
// exclusively around every form of begin capture. Open captures are a set of streams asked with cuStreamIsCapturing,
// not a counter, because a failed end leaves a capture open and a destroyed stream takes its capture with it.
//
// Order: enter() raises `recorders_` and then reads `closed_`; begin() raises `closed_` and then waits for `recorders_`
// to reach zero. Both are sequentially consistent, so of a recorder and a beginner at the same time at least one sees
// the other. A beginner waits for a record under way (about a microsecond), a recorder never waits.
// Cost of enter and leave: two uncontended atomic additions, about 10 ns.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/driver.h"
#include "core/mutation.h"

namespace cushion {

class CaptureGate {
 public:
  // Shared side. True: no capture is open, and none begins until leave().
  bool enter() noexcept {
    recorders_.fetch_add(1, std::memory_order_seq_cst);
    if (closed_.load(std::memory_order_seq_cst) == 0 || mutated(Mutation::capture_ignored)) return true;
    leave();
    return false;
  }
  void leave() noexcept { recorders_.fetch_sub(1, std::memory_order_seq_cst); }

  // Whether a capture may be open: one relaxed load. May be stale the moment it returns; only enter() is exact.
  bool may_be_open() const noexcept { return closed_.load(std::memory_order_relaxed) != 0; }

  // Exclusive side, around the real begin-capture call.
  void begin() noexcept {
    closed_.fetch_add(1, std::memory_order_seq_cst);
    while (recorders_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
  }
  // After the real call: on success the stream joins the set of open captures, else the gate opens again.
  void begun(CUstream stream, CUcontext context, long thread, bool success) noexcept;

  // After an end-capture call: forgets the captures that are over. The legacy stream is
  // never asked (asking invalidates a capture), nor another thread's per-thread stream.
  void refresh(const Driver& driver, long thread) noexcept;
  // Before a stream is destroyed, whose capture goes with it.
  void forget(CUstream stream, long thread) noexcept;
  // After a context has ended, and every capture in it.
  void forget(CUcontext context) noexcept;

  // Whether `stream` itself may be capturing: also where the driver does not say. Costs a driver call only while a
  // capture is open.
  bool capturing(const Driver& driver, CUstream stream) const noexcept {
    bool capturing = false;
    return may_be_open() && (ask(driver, stream, capturing) != CUDA_SUCCESS || capturing);
  }
  // What the driver says of it.
  CUresult ask(const Driver& driver, CUstream stream, bool& capturing) const noexcept;

 private:
  struct Open {
    CUstream stream;
    CUcontext context;
    long thread;  // the owner, for a per-thread stream; 0: any
  };
  static bool same(const Open& open, CUstream stream, long thread) noexcept {
    return open.stream == stream && (open.thread == 0 || open.thread == thread);
  }

  std::atomic<int> recorders_{0};  // threads between enter() and leave()
  std::atomic<int> closed_{0};     // captures open, plus beginners
  std::mutex mutex_;               // protects open_; held across cuStreamIsCapturing, which never blocks
  std::vector<Open> open_;
};

inline constexpr long kLegacyStream = 0x1;
inline constexpr long kPerThreadStream = 0x2;
inline CUstream stream_handle(long value) noexcept { return reinterpret_cast<CUstream>(value); }
inline bool is_legacy(CUstream s) noexcept { return s == nullptr || s == stream_handle(kLegacyStream); }
inline bool is_per_thread(CUstream s) noexcept { return s == stream_handle(kPerThreadStream); }
// What a handle means in a _ptsz variant, where stream 0 is the calling thread's own stream.
inline CUstream per_thread(CUstream stream) noexcept {
  return stream == nullptr ? stream_handle(kPerThreadStream) : stream;
}

}  // namespace cushion
