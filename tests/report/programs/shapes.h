// What the programs here share. Each calls site() from places that a test knows by the comment on their line, and it
// prints the place as the preload would write it: the module's path, and the address of the call in the module's file.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <cstdio>

// The call before it is no tail call.
#define KEEP asm volatile("" ::: "memory")
#define ALONE __attribute__((noinline))
#define INLINED __attribute__((always_inline)) inline

ALONE inline void site(const char* name) {
  const char* const call = static_cast<const char*>(__builtin_return_address(0)) - 1;
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(call, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) return;
  std::printf("%s\t%lu\t%s\n", name, reinterpret_cast<unsigned long>(call) - map->l_addr, map->l_name);
}
