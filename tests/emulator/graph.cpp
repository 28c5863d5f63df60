#include "graph.h"

#include <utility>

#include "capture.h"
#include "driver.h"

namespace emu {
namespace {

CUresult Instantiate(CUgraphExec* out, CUgraph handle) {
  Lock lock(global_mutex());
  const std::shared_ptr<Graph> graph = driver().graphs.Find(handle);
  Require(out != nullptr && graph != nullptr);
  RefuseDuringCapture();
  auto exec = std::make_shared<GraphExec>();
  exec->nodes = std::make_shared<const std::vector<Work>>(graph->nodes);
  exec->memory = graph->memory;
  *out = driver().graph_execs.Add(std::move(exec));
  return CUDA_SUCCESS;
}

}  // namespace

// Runs under the lock: the last graph or executable that knew the memory went.
GraphMemory::~GraphMemory() {
  for (const BlockPtr& block : blocks) Release(block);
}

CUresult GraphCreate(CUgraph* out, unsigned flags) {
  Lock lock(global_mutex());
  Require(out != nullptr && flags == 0);
  *out = driver().graphs.Add(std::make_shared<Graph>());
  return CUDA_SUCCESS;
}

CUresult GraphDestroy(CUgraph handle) {
  Lock lock(global_mutex());
  Require(driver().graphs.Take(handle) != nullptr);
  return CUDA_SUCCESS;
}

CUresult GraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long) {
  return Instantiate(out, graph);
}

CUresult GraphInstantiateWithLog(CUgraphExec* out, CUgraph graph, CUgraphNode* error_node, char* log, size_t size) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && size > 0) *log = '\0';
  return Instantiate(out, graph);
}

CUresult GraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  Lock lock(global_mutex());
  const std::shared_ptr<GraphExec> exec = driver().graph_execs.Find(handle);
  Require(exec != nullptr);
  const StreamPtr stream = StreamOf(stream_handle);
  const auto run = [nodes = exec->nodes] {
    for (const Work& node : *nodes) node();
  };
  if (stream->capture != nullptr) {
    AddNode(*stream, run);
    return CUDA_SUCCESS;
  }
  Tasks after;
  if (exec->last != nullptr) after.push_back(exec->last);
  // The memory stays until the launch is over.
  exec->last = Submit(*stream, run, after, [memory = exec->memory] {});
  return CUDA_SUCCESS;
}

CUresult GraphExecDestroy(CUgraphExec handle) {
  Lock lock(global_mutex());
  Require(driver().graph_execs.Take(handle) != nullptr);
  return CUDA_SUCCESS;
}

}  // namespace emu
