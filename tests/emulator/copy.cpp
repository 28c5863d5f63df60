// Copies and fills: checked against the live blocks at the call, done in stream order.
//
// As on the real driver, pageable host memory is read before an asynchronous copy returns, and written by the time it
// returns; pinned and managed memory is touched when the stream gets there. Fills and copies on the device do not make
// the host wait.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "capture.h"
#include "driver.h"

namespace emu {
namespace {

bool Known(std::uintptr_t address) { return LiveBlock(address) != nullptr; }

// Within one block, or across neighbouring mappings (measured: copies and fills do not mind where one ends).
void RequireRange(std::uintptr_t address, std::size_t bytes) {
  for (;;) {
    const BlockPtr block = LiveBlock(address);
    Require(block != nullptr);
    const std::size_t here = block->base + block->size - address;
    if (bytes <= here) return;
    Require(block->kind == Block::Kind::kMapped);
    address += here;
    bytes -= here;
  }
}

enum class Host { kReturns, kWaits };

// Copies between any two addresses; those outside every block are pageable host memory.
void Copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, CUstream handle, Host host) {
  Lock lock(global_mutex());
  const StreamPtr stream = StreamOf(handle);
  if (host == Host::kWaits) RefuseOn(*stream);
  if (host == Host::kWaits) RefuseDuringCapture();
  if (bytes == 0) return;
  if (Known(to)) RequireRange(to, bytes);
  Work work;
  if (Known(from)) {
    RequireRange(from, bytes);
    work = [=] { std::memmove(PointerTo(to), PointerTo(from), bytes); };
  } else {
    auto staged = std::make_shared<std::vector<std::byte>>(PointerTo(from), PointerTo(from) + bytes);
    work = [to, staged = std::move(staged)] { std::memcpy(PointerTo(to), staged->data(), staged->size()); };
  }
  if (stream->capture != nullptr) {
    AddNode(*stream, std::move(work));
    return;
  }
  const TaskPtr task = Submit(*stream, std::move(work));
  if (host == Host::kReturns && Known(to)) return;
  WaitFor(lock, {task});
  Require(stream->context->broken == CUDA_SUCCESS, stream->context->broken);
}

void CopyToDevice(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream, Host host) {
  Require(bytes == 0 || from != nullptr);
  {
    Lock lock(global_mutex());
    if (bytes > 0) RequireRange(to, bytes);
  }
  Copy(to, AddressOf(from), bytes, stream, host);
}

void CopyToHost(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream, Host host) {
  Require(bytes == 0 || to != nullptr);
  {
    Lock lock(global_mutex());
    if (bytes > 0) RequireRange(from, bytes);
  }
  Copy(AddressOf(to), from, bytes, stream, host);
}

void CopyOnDevice(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  {
    Lock lock(global_mutex());
    if (bytes > 0) RequireRange(to, bytes);
    if (bytes > 0) RequireRange(from, bytes);
  }
  Copy(to, from, bytes, stream, Host::kReturns);
}

// By the C library, in pieces: in builds without optimisation a loop over the elements takes a minute for a gigabyte.
template <class Element>
void Repeat(std::byte* to, Element value, std::size_t count) {
  constexpr std::size_t kPiece = std::size_t{64} << 10;
  const std::size_t bytes = count * sizeof(Element);
  std::memcpy(to, &value, sizeof(Element));
  for (std::size_t done = sizeof(Element); done < bytes;) {
    const std::size_t piece = std::min({done, bytes - done, kPiece});
    std::memcpy(to + done, to, piece);
    done += piece;
  }
}

template <class Element>
CUresult Fill(CUdeviceptr address, Element value, std::size_t count, CUstream handle) {
  Lock lock(global_mutex());
  Require(address % sizeof(Element) == 0);
  const StreamPtr stream = StreamOf(handle);
  if (count == 0) return CUDA_SUCCESS;
  RequireRange(address, count * sizeof(Element));
  Issue(*stream, [=] { Repeat(PointerTo(address), value, count); });
  return CUDA_SUCCESS;
}

}  // namespace

CUresult MemsetD8(CUdeviceptr address, unsigned char value, size_t count) {
  return Fill(address, value, count, nullptr);
}

CUresult MemsetD32(CUdeviceptr address, unsigned value, size_t count) { return Fill(address, value, count, nullptr); }

CUresult MemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  return Fill(address, value, count, stream);
}

CUresult MemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  return Fill(address, value, count, stream);
}

CUresult MemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  CopyToDevice(to, from, bytes, nullptr, Host::kWaits);
  return CUDA_SUCCESS;
}

CUresult MemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  CopyToHost(to, from, bytes, nullptr, Host::kWaits);
  return CUDA_SUCCESS;
}

CUresult MemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  CopyOnDevice(to, from, bytes, nullptr);
  return CUDA_SUCCESS;
}

CUresult Memcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  Copy(to, from, bytes, nullptr, Host::kWaits);
  return CUDA_SUCCESS;
}

CUresult MemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  CopyToDevice(to, from, bytes, stream, Host::kReturns);
  return CUDA_SUCCESS;
}

CUresult MemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CopyToHost(to, from, bytes, stream, Host::kReturns);
  return CUDA_SUCCESS;
}

CUresult MemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CopyOnDevice(to, from, bytes, stream);
  return CUDA_SUCCESS;
}

CUresult MemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Copy(to, from, bytes, stream, Host::kReturns);
  return CUDA_SUCCESS;
}

}  // namespace emu
