#include "tests/harness/gpu.h"

#include <atomic>

namespace harness {

Gpu::Gpu(int ordinal) {
  CHECK_CU(0, driver().Init(0));
  CHECK_CU(0, driver().DeviceGet(&device, ordinal));
  CHECK_CU(0, driver().DevicePrimaryCtxRetain(&context, device));
  CHECK_CU(0, driver().CtxSetCurrent(context));
}

Gpu::~Gpu() {
  driver().DevicePrimaryCtxRelease(device);
  driver().CtxSetCurrent(nullptr);
}

void GpuTest::SetUp() {
  if (!Driver::Missing().empty()) GTEST_SKIP() << Driver::Missing();
  gpu_ = std::make_unique<Gpu>();
}

void GpuTest::TearDown() { gpu_.reset(); }

SharedWord::SharedWord() {
  void* word = nullptr;
  CHECK_CU(0, driver().MemHostAlloc(&word, sizeof *word_, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
  CHECK_CU(0, driver().MemHostGetDevicePointer(&on_device_, word, 0));
  word_ = static_cast<std::uint32_t*>(word);
  Set(0);
}

SharedWord::~SharedWord() { driver().MemFreeHost(word_); }

void SharedWord::Set(std::uint32_t value) { std::atomic_ref(*word_).store(value); }

std::uint32_t SharedWord::Get() const { return std::atomic_ref(*word_).load(); }

std::vector<std::uint8_t> Bytes(CUdeviceptr address, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  CHECK_CU(0, driver().MemcpyDtoH(bytes.data(), address, count));
  return bytes;
}

}  // namespace harness
