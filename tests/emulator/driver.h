// The state of the emulated driver: devices, and the tables that give handles their meaning.
//
// Made on first use and never destroyed: workers and static destructors of programs may still be at work when the
// process ends. All of it is guarded by global_mutex().
#pragma once

#include "context.h"
#include "event.h"
#include "graph.h"
#include "handles.h"
#include "kernel.h"
#include "memory.h"
#include "pool.h"
#include "stream.h"
#include "vmm.h"

namespace emu {

struct Driver {
  Driver();

  std::vector<std::unique_ptr<Device>> devices;
  Handles<CUcontext, Context> contexts{0x1000'0000, Reuse::kNever};
  Handles<CUstream, Stream> streams{0x2000'0000};
  Handles<CUevent, Event> events{0x3000'0000};
  Handles<CUmemoryPool, Pool> pools{0x4000'0000};
  Handles<CUgraph, Graph> graphs{0x5000'0000};
  Handles<CUgraphExec, GraphExec> graph_execs{0x6000'0000};
  Handles<CUmodule, Module> modules{0x7000'0000};
  AddressMap blocks;
  VirtualMemory virtual_memory;
};

Driver& driver();

Device& DeviceAt(CUdevice ordinal);

}  // namespace emu
