// Graphs: the work a capture recorded, run again as one task.
//
// The nodes run one after the other in the order they were captured, which keeps every dependency of the capture.
// Memory allocated by nodes has its address from the capture on, and lives until the graph and its last executable
// are gone.
#pragma once

#include "memory.h"
#include "stream.h"

namespace emu {

struct GraphMemory {
  std::vector<BlockPtr> blocks;
  ~GraphMemory();
};

struct Graph {
  std::vector<Work> nodes;
  std::shared_ptr<GraphMemory> memory = std::make_shared<GraphMemory>();
};

struct GraphExec {
  std::shared_ptr<const std::vector<Work>> nodes;
  std::shared_ptr<GraphMemory> memory;
  TaskPtr last;  // launches of one executable graph run one after the other
};

}  // namespace emu
