// Libraries: walks over the program and the libraries that the dynamic linker has loaded.
//
// Invariant: no fork happens inside a walk. dl_iterate_phdr holds a lock of the linker's that fork gives to the child
// as it is: held by a thread that the child does not have, it would make the child's next dlopen wait for ever. So a
// walk holds a lock of ours around it, and a fork takes that one first. For the same reason nothing here asks dlopen
// whether a library is loaded: for one that is not, it maps the linker's cache and unmaps it again, and a child forked
// meanwhile dies in its next dlopen (glibc 2.36, measured).
//
// Thread safety: any thread, one at a time; not in signal handlers. Cost: about 0.1 µs, and 0.1 µs for each library
// visited.
#pragma once

#include <link.h>

#include <cstddef>
#include <cstdint>

namespace cushion {

namespace libraries {
// Locks and unlocks what a walk holds. The first lock() registers the fork handlers.
void lock() noexcept;
void unlock() noexcept;
}  // namespace libraries

// visit(const dl_phdr_info&) for each, until one answers true. It must not throw.
template <class Visit>
void for_each_library(Visit visit) noexcept {
  libraries::lock();
  dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* to) { return (*static_cast<Visit*>(to))(*library) ? 1 : 0; },
      &visit);
  libraries::unlock();
}

// Its addresses: from the first of its segments to behind the last.
struct AddressRange {
  std::uint64_t low;
  std::uint64_t high;
  bool holds(std::uint64_t address) const noexcept { return address >= low && address < high; }
};
AddressRange addresses_of(const dl_phdr_info& library) noexcept;
// Of its path, the last part.
const char* file_name(const dl_phdr_info& library) noexcept;
// Whether a library is loaded whose file's name begins so.
bool is_loaded(const char* prefix) noexcept;

// How many libraries were ever unloaded: while it stays the same, an address found earlier is still the same code's.
std::uint64_t unloads() noexcept;

}  // namespace cushion
