// Handles for other processes: made, and not opened.
//
// A memory handle names the base allocation of the address it is asked for, as the real driver's does (contract §5:
// the handles of base and base + 1 MiB are identical). Opening one answers an error, in this process and in others.
#include <unistd.h>

#include <cstring>

#include "driver.h"

namespace emu {
namespace {

struct Name {
  pid_t process;
  std::uint64_t id;
};

template <class Handle>
void Write(Handle* handle, std::uint64_t id) {
  const Name name{getpid(), id};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->reserved, &name, sizeof name);
}

}  // namespace

CUresult IpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  Lock lock(global_mutex());
  CurrentContext();
  const BlockPtr block = LiveBlock(address);
  Require(out != nullptr && block != nullptr && block->kind == Block::Kind::kDevice);
  Write(out, block->id);
  return CUDA_SUCCESS;
}

CUresult IpcOpenMemHandle(CUdeviceptr*, CUipcMemHandle, unsigned) { return CUDA_ERROR_INVALID_CONTEXT; }

CUresult IpcCloseMemHandle(CUdeviceptr) { return CUDA_ERROR_INVALID_VALUE; }

CUresult IpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  Lock lock(global_mutex());
  const EventPtr event = EventOf(handle);
  Require(out != nullptr && (event->flags & CU_EVENT_INTERPROCESS) != 0);
  Write(out, AddressOf(event.get()));
  return CUDA_SUCCESS;
}

CUresult IpcOpenEventHandle(CUevent*, CUipcEventHandle) { return CUDA_ERROR_INVALID_CONTEXT; }

}  // namespace emu
