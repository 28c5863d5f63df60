// Says which libraries are asked of dlopen that are not loaded (core/libraries.h says why nobody of ours may).
#include <dlfcn.h>

#include <cstdio>

extern "C" __attribute__((visibility("default"))) void* dlopen(const char* name, int mode) noexcept {
  static const auto next = reinterpret_cast<void* (*)(const char*, int)>(dlsym(RTLD_NEXT, "dlopen"));
  void* const found = next(name, mode);
  if (found == nullptr && (mode & RTLD_NOLOAD) != 0) std::fprintf(stderr, "loader_watch: %s is not loaded\n", name);
  return found;
}
