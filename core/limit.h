// Limit (CUSHION_LIMIT): the most bytes of each device that the process may have: what the pools of its contexts hold,
// and what the driver serves it itself by calls whose size and free are seen (cudaMalloc, cudaMallocAsync, also from a
// pool, cudaMallocPitch). Not counted: managed memory, which may lie on the host; cuMemCreate, arrays, modules and what
// a context itself takes.
//
// Invariant: what is counted and what is claimed never come to more than the limit, whatever threads do at once: a
// claim is looked at and made under one lock, before the driver is asked, and it ends only when the bytes are counted
// or were refused. Meanwhile they may count twice, and be more than will be used: who is refused for that waits.
//
// Cost: without a limit a load; else a lock and a few loads for each growth and each call that the driver serves.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

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
    ~Claim() { settle(); }
    std::uint64_t bytes() const noexcept { return bytes_; }
    // The bytes are counted, or were refused.
    void settle() noexcept {
      if (limit_ != nullptr) std::exchange(limit_, nullptr)->end(device_, bytes_);
    }

   private:
    Limit* limit_ = nullptr;
    int device_ = 0;
    std::uint64_t bytes_ = 0;
  };
  // Up to `most` bytes, as many as there is room for, in whole multiples of `unit`; fewer than `least` are none. While
  // others' claims are what leaves no room for that, it waits for them, at most OOM_WAIT: with no lock held.
  Claim claim(Shared& shared, int device, std::uint64_t most, std::uint64_t unit, std::uint64_t least) noexcept;
  // Whether a request is larger than the limit.
  bool hopeless(const Driver& driver, int device, std::uint64_t bytes) const noexcept {
    return on_ && bytes > of(most_, driver, device);
  }

  // Bytes counted against it.
  std::uint64_t used(Shared& shared, int device) noexcept;
  // Of what the driver served, what counts. Under Runtime's foreign_mutex_, readable without.
  std::atomic<std::uint64_t>& foreign(int device) noexcept { return foreign_[static_cast<std::size_t>(device)]; }

 private:
  void end(int device, std::uint64_t bytes) noexcept;

  bool on_ = false;
  Size most_{};
  std::mutex mutex_;  // protects claimed_; taken under a context's lock, and nothing under it
  std::array<std::uint64_t, kDevices> claimed_{};
  std::array<std::atomic<std::uint64_t>, kDevices> foreign_{};  // relaxed: sums of their own
};

}  // namespace cushion
