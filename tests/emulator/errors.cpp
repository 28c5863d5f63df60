// Names of the codes that the emulated driver answers.
#include <array>

#include "api.h"

namespace emu {
namespace {

struct Named {
  CUresult code;
  const char* name;
  const char* text;
};

#define EMU_ERROR(code, text) \
  Named { code, #code, text }
constexpr std::array kErrors{
    EMU_ERROR(CUDA_SUCCESS, "no error"),
    EMU_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    EMU_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    EMU_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    EMU_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    EMU_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    EMU_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    EMU_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    EMU_ERROR(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, "exec affinity is not supported"),
    EMU_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    EMU_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    EMU_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    EMU_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    EMU_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    EMU_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    EMU_ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    EMU_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    EMU_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the memory is already mapped"),
    EMU_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    EMU_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    EMU_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    EMU_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capture"),
    EMU_ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    EMU_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
              "attempt to terminate a thread-local capture from another thread"),
    EMU_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef EMU_ERROR

CUresult Find(CUresult code, const char** out, const char* Named::*field) {
  Require(out != nullptr);
  *out = nullptr;
  for (const Named& error : kErrors) {
    if (error.code == code) *out = error.*field;
  }
  return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

CUresult GetErrorName(CUresult code, const char** out) { return Find(code, out, &Named::name); }

CUresult GetErrorString(CUresult code, const char** out) { return Find(code, out, &Named::text); }

}  // namespace emu
