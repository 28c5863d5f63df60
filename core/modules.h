// Modules: the program and the libraries that call stacks lead through, each by its file, its build id and where it was
// loaded, so that an address can be named later, by another process.
//
// Invariant: an entry never changes but to be told gone, when a library was unloaded and its addresses may become
// another's: what was found in it before keeps it.
// Cost: a look at the known modules (a handful of compares each); a module that is new costs a walk over all that are
// loaded, about 0.1 µs for each. Thread safety: any thread. Takes the dynamic linker's list lock, which dlopen holds
// only while it changes the list; no lock of Cushion's is held across it but its own.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/ledger.h"

namespace cushion {

struct Module {
  std::uint64_t low = 0;         // addresses of its segments
  std::uint64_t high = 0;        // behind the last
  std::uint64_t bias = 0;        // an address minus this is the file's own
  std::uint64_t unwind = 0;      // its .eh_frame_hdr, 0: none
  std::uint64_t unwind_low = 0;  // the segment that this is in
  std::uint64_t unwind_high = 0;
  std::atomic<bool> gone{false};
  bool program = false;  // not a library
  std::uint8_t build_id_size = 0;
  std::array<unsigned char, 20> build_id{};
  char path[488]{};  // ends with 0
};

class Modules {
 public:
  static constexpr std::size_t kMost = 4096;

  // The module that holds the address, by its place; -1: none that is known.
  int find(std::uint64_t address) noexcept;
  // Before many finds: libraries that were unloaded since the last call are told gone. True: there were any.
  bool refresh() noexcept;

  std::size_t size() const noexcept { return modules_.size(); }
  const Module& operator[](std::size_t i) const noexcept { return modules_[i]; }

 private:
  int known(std::uint64_t address) const noexcept;

  std::mutex mutex_;  // protects adding; the dynamic linker's list lock is taken under it, and never the other way
  Ledger<Module, kMost> modules_;
  std::atomic<std::uint64_t> unloads_{0};  // libraries that the process had unloaded at the last refresh
};

}  // namespace cushion
