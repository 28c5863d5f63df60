// Virtual memory management: addresses, physical memory and mappings as three separate things.
//
// Physical memory is an anonymous file, so that several addresses can show the same bytes. A mapping becomes a block,
// which work may touch, once access to it is set. Multicast, export and fabric handles do not exist here.
#pragma once

#include <map>
#include <memory>

#include "memory.h"

namespace emu {

struct Physical {
  Physical(Device& owner, std::size_t bytes);
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  Device& device;
  const std::size_t size;
  int file;
};

struct Mapping {
  std::shared_ptr<Physical> physical;
  std::size_t size = 0;
  BlockPtr block;
};

struct VirtualMemory {
  std::map<std::uintptr_t, std::size_t> reservations;
  std::map<std::uintptr_t, Mapping> mappings;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles;
  CUmemGenericAllocationHandle last_handle = 0;
};

}  // namespace emu
