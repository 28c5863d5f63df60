// Handles for other processes.
//
// A memory handle names the base allocation of the address it is asked for, as the real driver's does (contract §5:
// the handles of base and base + 1 MiB are identical). Another process maps that memory from the device's file, once:
// who opens it again gets the same pointer. In its own process, and if it is no handle, opening one answers an error.
// Events are not opened.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "context.h"
#include "driver.h"
#include "memory.h"

namespace emu {
namespace {

struct Name {
  char magic[8];
  std::int64_t process;
  std::uint64_t id;
  std::int64_t file;
  std::uint64_t place;
  std::uint64_t size;
};
constexpr char kMagic[8] = "EMU-IPC";

template <class Handle>
void Write(Handle* handle, Name name) {
  std::memcpy(name.magic, kMagic, sizeof kMagic);
  name.process = getpid();
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->reserved, &name, sizeof name);
}

struct Import {
  BlockPtr block;
  void* pages;
  std::size_t mapped;
  unsigned times;
};
std::map<std::pair<std::int64_t, std::uint64_t>, Import>& imports() {
  static std::map<std::pair<std::int64_t, std::uint64_t>, Import> all;
  return all;
}

}  // namespace

CUresult IpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  Lock lock(global_mutex());
  CurrentContext();
  const BlockPtr block = LiveBlock(address);
  Require(out != nullptr && block != nullptr && block->kind == Block::Kind::kDevice);
  const Device& device = DeviceAt(block->device);
  Require(device.file() >= 0, CUDA_ERROR_NOT_SUPPORTED);
  Write(out, {{}, 0, block->id, device.file(), device.PlaceOf(block->base), block->size});
  return CUDA_SUCCESS;
}

CUresult IpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) {
  Lock lock(global_mutex());
  const ContextPtr context = CurrentContext();
  Name name{};
  std::memcpy(&name, handle.reserved, sizeof name);
  Require(out != nullptr && flags <= CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  Require(std::memcmp(name.magic, kMagic, sizeof kMagic) == 0);
  Require(name.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
  Import& import = imports()[{name.process, name.id}];
  if (import.times == 0) {
    const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    const std::size_t ahead = name.place % 4096;
    import.mapped = name.size + ahead;
    import.pages = file < 0 ? MAP_FAILED : mmap(nullptr, import.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                                   static_cast<off_t>(name.place - ahead));
    if (file >= 0) close(file);
    Require(import.pages != MAP_FAILED);
    import.block = NewBlock(Block::Kind::kImported, context, {AddressOf(import.pages) + ahead, name.size}, name.size);
  }
  ++import.times;
  *out = import.block->base;
  return CUDA_SUCCESS;
}

CUresult IpcCloseMemHandle(CUdeviceptr address) {
  Lock lock(global_mutex());
  const BlockPtr block = LiveBlock(address);
  Require(block != nullptr && block->kind == Block::Kind::kImported && block->base == address);
  const auto import =
      std::find_if(imports().begin(), imports().end(), [&](const auto& entry) { return entry.second.block == block; });
  if (--import->second.times != 0) return CUDA_SUCCESS;
  Release(block);
  munmap(import->second.pages, import->second.mapped);
  imports().erase(import);
  return CUDA_SUCCESS;
}

CUresult IpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  Lock lock(global_mutex());
  const EventPtr event = EventOf(handle);
  Require(out != nullptr && (event->flags & CU_EVENT_INTERPROCESS) != 0);
  Write(out, {{}, 0, AddressOf(event.get()), 0, 0, 0});
  return CUDA_SUCCESS;
}

CUresult IpcOpenEventHandle(CUevent*, CUipcEventHandle) { return CUDA_ERROR_INVALID_CONTEXT; }

}  // namespace emu
