// Settings of the emulated driver: environment variables, read once.
//
//   EMU_MEMORY=8G               bytes of each device (K, M, G suffixes), default 4G
//   EMU_DEVICES=2               number of devices, default 1
//   EMU_DRIVER_VERSION=12020    what cuDriverGetVersion says, default 13000. Functions newer than it are not found by
//                               cuGetProcAddress; their ELF symbols cannot vanish, so called directly they answer
//                               CUDA_ERROR_NOT_FOUND. A caller that uses dlsym must consult cuDriverGetVersion.
//   EMU_FAIL=cuMemAlloc:3:2     the third call of that function, and no other, answers 2 (the default code); the name
//                               is the ELF one, else the one asked of cuGetProcAddress; several separated by commas.
//                               cuMemAlloc:3+:2 fails every call from the third on
//   EMU_COUNT=FILE              at the end of a process that called cuInit: "function calls" lines, ELF names
//   EMU_LEFT=FILE               at the same time: "kind objects bytes" lines, what the process still had of the driver
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "api.h"

namespace emu {

struct PlannedFailure {
  std::string function;
  unsigned long call;
  bool and_later;
  CUresult code;
};

struct Settings {
  std::size_t memory;
  int devices;
  int driver_version;
  std::vector<PlannedFailure> failures;
  std::string count_file;
  std::string left_file;
};

const Settings& settings();

}  // namespace emu
