// Contexts: what streams, events and memory belong to, and what a thread has current.
//
// A device's primary context keeps one handle for ever and gets a new Context (a new cuCtxGetId) each time it comes
// alive; a created one has a handle of its own that is never used again. Invariant: a handle is in the driver's table
// exactly while its context lives, so a stale one answers CUDA_ERROR_CONTEXT_IS_DESTROYED. With a context go all its
// memory, streams and events (contract §2).
#pragma once

#include <set>
#include <unordered_map>

#include "stream.h"

namespace emu {

struct Context {
  CUcontext handle = nullptr;
  std::uint64_t id = 0;
  CUdevice device = 0;
  unsigned flags = 0;
  CUresult broken = CUDA_SUCCESS;  // the sticky error, if one happened
  std::unordered_map<CUlimit, std::size_t> limits;
  bool prints = false;  // a kernel that prints was launched: its buffer's size is fixed then (measured)

  StreamPtr legacy;
  std::vector<StreamPtr> streams;  // all but the legacy one, destroyed ones included until they are drained
  std::unordered_map<std::uint64_t, StreamPtr> per_thread;
  Tasks held_back_by;  // cuCtxWaitEvent: what streams created later wait for
  Clock held_back_clock;
  std::set<std::uint64_t> peers;  // ids of contexts whose memory this one may touch
};

using ContextPtr = std::shared_ptr<Context>;

// The calling thread's context, alive and not broken; refuses otherwise.
ContextPtr CurrentContext();

// The context a handle names, the current one for null.
ContextPtr ContextOf(CUcontext handle);

StreamPtr PerThreadStream(const ContextPtr& context);

// Identifies the calling thread; never used again by another one.
std::uint64_t ThreadToken();

// Unfinished work of the whole context, on every stream.
Tasks Pending(const Context& context);

// What is complete once all of that is.
Clock Covered(const Context& context);

}  // namespace emu
