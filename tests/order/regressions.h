// Programs that found a fault once, as short as they were made then, and programs written for one rule.
//
// They run before the random ones, or alone (`ordering_fuzz --regressions`), each in several ways in which its work may
// progress.
#pragma once

#include <string_view>
#include <vector>

#include "tests/order/program.h"

namespace order {

struct Regression {
  std::string_view what;
  Program program;
};

inline const std::vector<Regression>& Regressions() {
  static const std::vector<Regression> all{
      // The free on the legacy stream comes after stream 2's kernel, the allocation before stream 3's; but nothing is
      // put on the legacy stream in between that would order the two kernels.
      {"a block freed on the legacy stream and handed out again there",
       {
           {.what = Do::kStreamCreate, .stream = 2},
           {.what = Do::kStreamCreate, .stream = 3},
           {.what = Do::kAllocAsync, .block = 0, .bytes = 65536},
           {.what = Do::kLaunch, .stream = 2, .block = 0},
           {.what = Do::kFreeAsync, .block = 0},
           {.what = Do::kAllocAsync, .block = 1, .bytes = 65536},
           {.what = Do::kLaunch, .stream = 3, .block = 1},
       }},
      // The second allocation finds the limit; the free must put nothing on the legacy stream that would hold stream 2
      // back behind the kernel that spins.
      {"a free on the legacy stream near the limit, while a kernel spins",
       {
           {.what = Do::kAllocAsync, .block = 1, .bytes = 65536},
           {.what = Do::kStreamCreate, .stream = 6},
           {.what = Do::kStreamCreate, .stream = 2},
           {.what = Do::kAlloc, .block = 2, .bytes = 65536},
           {.what = Do::kAllocAsync, .bytes = 3145728},
           {.what = Do::kSpin, .stream = 6},
           {.what = Do::kFreeAsync, .block = 1},
           {.what = Do::kLaunch, .stream = 2, .block = 2},
           {.what = Do::kStreamSync, .stream = 2},
           {.what = Do::kSetFlag},
       }},
      // The allocation on the legacy stream finds the limit. A wait put on that stream would hold stream 2 back.
      {"an allocation on the legacy stream near the limit, while a kernel spins",
       {
           {.what = Do::kStreamCreate, .stream = 2},
           {.what = Do::kStreamCreate, .stream = 3},
           {.what = Do::kAllocAsync, .block = 3, .bytes = 2097152},
           {.what = Do::kAllocAsync, .block = 2, .bytes = 2097152},
           {.what = Do::kSpin, .stream = 3},
           {.what = Do::kAllocAsync, .bytes = 2097152},
           {.what = Do::kFreeAsync, .stream = 3, .block = 2},
           {.what = Do::kAllocAsync, .block = 2, .bytes = 2097152},
           {.what = Do::kRecord, .stream = 2},
           {.what = Do::kEventSync},
           {.what = Do::kSetFlag},
       }},
      // The event was recorded before the kernel and the free: it orders neither before stream 3.
      {"a free after the event that another stream waits for",
       {
           {.what = Do::kStreamCreate, .stream = 2, .mode = 1},
           {.what = Do::kStreamCreate, .stream = 3, .mode = 1},
           {.what = Do::kAllocAsync, .stream = 2, .block = 0, .bytes = 3145728},
           {.what = Do::kRecord, .stream = 2},
           {.what = Do::kLaunch, .stream = 2, .block = 0},
           {.what = Do::kFreeAsync, .stream = 2, .block = 0},
           {.what = Do::kWait, .stream = 3},
           {.what = Do::kAllocAsync, .stream = 3, .block = 1, .bytes = 3145728},
           {.what = Do::kLaunch, .stream = 3, .block = 1},
       }},
      // Of two neighbours one was freed before the event, the other after it.
      {"neighbours freed before and after an event",
       {
           {.what = Do::kStreamCreate, .stream = 2, .mode = 1},
           {.what = Do::kStreamCreate, .stream = 3, .mode = 1},
           {.what = Do::kAllocAsync, .stream = 2, .block = 0, .bytes = 1 << 20},
           {.what = Do::kAllocAsync, .stream = 2, .block = 1, .bytes = 1 << 20},
           {.what = Do::kAllocAsync, .stream = 2, .block = 2, .bytes = 1 << 20},
           {.what = Do::kAllocAsync, .stream = 2, .block = 3, .bytes = 1 << 20},
           {.what = Do::kFreeAsync, .stream = 2, .block = 0},
           {.what = Do::kRecord, .stream = 2},
           {.what = Do::kLaunch, .stream = 2, .block = 1},
           {.what = Do::kFreeAsync, .stream = 2, .block = 1},
           {.what = Do::kWait, .stream = 3},
           {.what = Do::kAllocAsync, .stream = 3, .block = 4, .bytes = 2 << 20},
           {.what = Do::kLaunch, .stream = 3, .block = 4},
       }},
      // The flag is set after the allocation, which must not wait for the kernel that spins on it.
      {"an allocation while a kernel spins",
       {
           {.what = Do::kStreamCreate, .stream = 2, .mode = 1},
           {.what = Do::kStreamCreate, .stream = 3, .mode = 1},
           {.what = Do::kAlloc, .block = 0, .bytes = 2 << 20},
           {.what = Do::kAllocAsync, .stream = 2, .block = 1, .bytes = 2 << 20},
           {.what = Do::kAllocAsync, .stream = 3, .block = 2, .bytes = 2 << 20},
           {.what = Do::kSpin, .stream = 2},
           {.what = Do::kLaunch, .stream = 2, .block = 1},
           {.what = Do::kFreeAsync, .stream = 2, .block = 1},
           {.what = Do::kFreeAsync, .stream = 3, .block = 2},
           {.what = Do::kAlloc, .block = 3, .bytes = 2 << 20},
           {.what = Do::kAllocAsync, .stream = 3, .block = 4, .bytes = 2 << 20},
           {.what = Do::kLaunch, .stream = 3, .block = 4},
           {.what = Do::kAlloc, .block = 5, .bytes = 2 << 20},
           {.what = Do::kSetFlag},
           {.what = Do::kStreamSync, .stream = 3},
       }},
  };
  return all;
}

}  // namespace order
