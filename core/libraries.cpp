#include "core/libraries.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

namespace cushion {
namespace libraries {
namespace {

constinit std::mutex g_mutex;  // protects nothing but forks from walks; the linker's list lock is taken under it
enum class Handlers : int { none, coming, there };
constinit std::atomic<Handlers> g_handlers{Handlers::none};

void register_handlers() noexcept {
  Handlers none = Handlers::none;
  if (g_handlers.compare_exchange_strong(none, Handlers::coming)) {
    pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, [] { g_mutex.unlock(); });
    g_handlers.store(Handlers::there, std::memory_order_release);
  }
  while (g_handlers.load(std::memory_order_acquire) != Handlers::there) sched_yield();
}

}  // namespace

void lock() noexcept {
  if (g_handlers.load(std::memory_order_acquire) != Handlers::there) register_handlers();
  g_mutex.lock();
}
void unlock() noexcept { g_mutex.unlock(); }

}  // namespace libraries

AddressRange addresses_of(const dl_phdr_info& library) noexcept {
  AddressRange range{~std::uint64_t{0}, 0};
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = library.dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    range.low = std::min<std::uint64_t>(range.low, library.dlpi_addr + part.p_vaddr);
    range.high = std::max<std::uint64_t>(range.high, library.dlpi_addr + part.p_vaddr + part.p_memsz);
  }
  return range;
}

const char* file_name(const dl_phdr_info& library) noexcept {
  const char* const slash = std::strrchr(library.dlpi_name, '/');
  return slash != nullptr ? slash + 1 : library.dlpi_name;
}

bool is_loaded(const char* prefix) noexcept {
  bool found = false;
  for_each_library([&](const dl_phdr_info& library) {
    return found = std::strncmp(file_name(library), prefix, std::strlen(prefix)) == 0;
  });
  return found;
}

std::uint64_t unloads() noexcept {
  std::uint64_t count = 0;
  for_each_library([&](const dl_phdr_info& library) {
    count = library.dlpi_subs;
    return true;
  });
  return count;
}

}  // namespace cushion
