// History: the last operations of every thread, each with the bytes it was about, so that a wrong byte can be told
// with the names of those who had it. A ring a thread, written by that thread alone and read when it is over, or stuck.
// Cost: two clock readings and 64 bytes an operation.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "torture_signature.h"

inline std::uint64_t host_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

struct Operation {
  const char* name;
  const unsigned char* at;
  std::size_t size;
  std::uint64_t serial;  // the block's
  cudaStream_t stream;
  std::uint64_t begin, end;  // host_ns; end 0: not over
  unsigned thread;
};

class Ring {
 public:
  Operation& next() { return operations_[count_++ % kLength]; }
  std::uint64_t count() const { return count_; }
  const Operation& last() const { return operations_[(count_ + kLength - 1) % kLength]; }
  template <class Each>
  void for_each(Each each) const {
    for (std::uint64_t i = count_ > kLength ? count_ - kLength : 0; i < count_; ++i) each(operations_[i % kLength]);
  }

 private:
  static constexpr std::uint64_t kLength = 1 << 17;
  std::uint64_t count_ = 0;
  std::unique_ptr<Operation[]> operations_{new Operation[kLength]()};
};

class History {
 public:
  explicit History(unsigned threads) : rings_(threads), start_(host_ns()) {}
  Ring& ring(unsigned thread) { return rings_[thread]; }
  std::uint64_t operations() const {
    std::uint64_t all = 0;
    for (const Ring& ring : rings_) all += ring.count();
    return all;
  }
  // The device's clock minus the host's.
  void set_device_offset(std::int64_t ns) { device_offset_ = ns; }

  void print_last() const {
    for (const Ring& ring : rings_) {
      if (ring.count() != 0) print(ring.last());
    }
  }
  void print(const Wrong& wrong) const {
    const Origin origin = origin_of(wrong.found);
    std::printf("WRONG at %p: %u bytes of block %s", static_cast<const void*>(wrong.at), wrong.width,
                name(wrong.serial).c_str());
    std::printf(", seen by a kernel at %.6f s; found %016llx",
                seconds(wrong.device_ns - static_cast<std::uint64_t>(device_offset_)),
                static_cast<unsigned long long>(wrong.found));
    const bool known = wrong.width == 8 && (origin.serial >> 32) < rings_.size() &&
                       static_cast<std::uint32_t>(origin.serial) != 0 && origin.offset * 8 < (std::size_t{1} << 27);
    if (known) {
      std::printf(", which is byte %llu of block %s\n", static_cast<unsigned long long>(origin.offset * 8),
                  name(origin.serial).c_str());
    } else {
      std::printf(", which is no block's\n");
    }
    std::vector<Operation> about;
    for (const Ring& ring : rings_) {
      ring.for_each([&](const Operation& o) {
        const bool has_it = o.at != nullptr && o.at < wrong.at + wrong.width && wrong.at < o.at + o.size;
        if (has_it || o.serial == wrong.serial || (known && o.serial == origin.serial)) about.push_back(o);
      });
    }
    std::sort(about.begin(), about.end(), [](const Operation& a, const Operation& b) { return a.begin < b.begin; });
    constexpr std::size_t kMost = 60;
    if (about.size() > kMost) about.erase(about.begin(), about.end() - kMost);
    for (const Operation& o : about) print(o);
  }

 private:
  static std::string name(std::uint64_t serial) {
    return std::to_string(serial >> 32) + "." + std::to_string(static_cast<std::uint32_t>(serial));
  }
  double seconds(std::uint64_t ns) const { return static_cast<double>(static_cast<std::int64_t>(ns - start_)) * 1e-9; }
  void print(const Operation& o) const {
    std::printf("  %11.6f", seconds(o.begin));
    o.end != 0 ? std::printf(" - %11.6f", seconds(o.end)) : std::printf(" - (not over)");
    std::printf("  thread %-3u %-28s block %-12s %p + %zu  stream %p\n", o.thread, o.name, name(o.serial).c_str(),
                static_cast<const void*>(o.at), o.size, static_cast<void*>(o.stream));
  }

  std::vector<Ring> rings_;
  std::uint64_t start_;
  std::int64_t device_offset_ = 0;
};
