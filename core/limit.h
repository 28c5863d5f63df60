// Limit (CUSHION_LIMIT): the most bytes of each device that the process may have: what the pools of its contexts hold,
// and what the driver serves it itself by calls whose size and free are seen (cudaMalloc, cudaMallocAsync, also from a
// pool, cudaMallocPitch). Not counted: managed memory, which may lie on the host; cuMemCreate, arrays, modules and what
// a context itself takes.
//
// Invariant: what is counted and what is claimed never come to more than the limit, whatever threads do at once: a
// claim is looked at and made under one lock, before the driver is asked, and it ends only when the bytes are counted
// or were refused. Meanwhile they may count twice, so that one thread can be refused what another has just got.
//
// Cost: without a limit a load; else a lock and a few loads for each growth and each call that the driver serves.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/control_page.h"
#include "core/options.h"

namespace cushion {

struct Driver;
struct Shared;

class Limit {
 public:
  constexpr Limit() = default;
  void set(const Size& most) noexcept;  // before the first claim
  bool on() const noexcept { return on_; }
  // Of the device, in bytes; no more than it has. About 0.1 µs.
  static std::uint64_t of(const Size& most, const Driver& driver, int device) noexcept;

  // What the process may use between asking the driver and counting what it got.
  class Claim {
   public:
    Claim() = default;  // there is no limit
    Claim(Limit& limit, int device, std::uint64_t bytes) noexcept : limit_(&limit), device_(device), bytes_(bytes) {}
    explicit operator bool() const noexcept { return limit_ == nullptr || bytes_ != 0; }
    Claim(Claim&& other) noexcept : limit_(other.limit_), device_(other.device_), bytes_(other.bytes_) {
      other.limit_ = nullptr;
    }
    Claim& operator=(Claim&&) = delete;
    ~Claim() {
      if (limit_ != nullptr) limit_->end(device_, bytes_);
    }
    std::uint64_t bytes() const noexcept { return bytes_; }

   private:
    Limit* limit_ = nullptr;
    int device_ = 0;
    std::uint64_t bytes_ = 0;
  };
  // Up to `most` bytes, as many as there is room for, in whole multiples of `unit`.
  Claim claim(Shared& shared, int device, std::uint64_t most, std::uint64_t unit) noexcept;

  // Bytes counted against it.
  static std::uint64_t used(Shared& shared, int device) noexcept;
  // Of what the driver served, what is not: managed memory.
  std::atomic<std::uint64_t>& managed(int device) noexcept { return managed_[static_cast<std::size_t>(device)]; }

 private:
  void end(int device, std::uint64_t bytes) noexcept;

  bool on_ = false;
  Size most_{};
  std::mutex mutex_;  // protects claimed_; taken under a context's lock, and nothing under it
  std::array<std::uint64_t, kDevices> claimed_{};
  std::array<std::atomic<std::uint64_t>, kDevices> managed_{};  // relaxed: sums of their own
};

}  // namespace cushion
