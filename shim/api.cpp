// The C API: include/cushion.h's functions, which the program finds by dlsym.
#define CUSHION_DECLARATIONS_ONLY
#include <unistd.h>

#include <cerrno>

#include "include/cushion.h"
#include "shim/process.h"

#define CUSHION_API extern "C" __attribute__((visibility("default")))

namespace cushion {
namespace {

// The runtime if it serves: not in a child, a vfork's either.
Runtime* running() noexcept {
  if (g_life.load(std::memory_order_acquire) != Life::serving) return nullptr;
  return runtime().program().pid == getpid() ? &runtime() : nullptr;
}

}  // namespace
}  // namespace cushion

using namespace cushion;

// Each a line of its own: the exports are made from these lines.
CUSHION_API int cushion_set_track(const char* level) noexcept;
CUSHION_API int cushion_mark(const char* name) noexcept;
CUSHION_API int cushion_report(const char* path) noexcept;

int cushion_set_track(const char* level) noexcept {
  const std::optional<Tracking> wanted = level != nullptr ? parse_tracking(level) : std::nullopt;
  if (!wanted) return CUSHION_INVALID;
  if (choose_track_before_start(*wanted)) return CUSHION_OK;
  Runtime* rt = running();
  if (rt == nullptr) return CUSHION_NOT_SERVING;
  rt->set_track(*wanted);
  return CUSHION_OK;
}

int cushion_mark(const char* name) noexcept {
  if (name == nullptr) return CUSHION_INVALID;
  if (running() == nullptr && !may_start()) return CUSHION_NOT_SERVING;
  return runtime().mark(name) ? CUSHION_OK : CUSHION_FULL;
}

int cushion_report(const char* path) noexcept {
  Runtime* rt = running();
  if (rt == nullptr) return CUSHION_NOT_SERVING;
  const int error = rt->report_now(path);
  if (error == 0) return CUSHION_OK;
  errno = error;
  return CUSHION_NOT_WRITTEN;
}
