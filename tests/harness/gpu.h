// What tests hold on a device: a context, streams, events and blocks that give themselves back.
//
// `Gpu` starts the driver and makes a device's primary context current; `GpuTest` is the fixture that has one, and
// skips, saying why, where there is no driver or device. CHECK_CU reports a wrong result by name and goes on;
// REQUIRE_CU ends the test. Destructors ignore errors: a context may have been broken on purpose.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/harness/driver.h"

#define CHECK_CU(expected, call) EXPECT_EQ(static_cast<CUresult>(expected), (call))
#define REQUIRE_CU(expected, call) ASSERT_EQ(static_cast<CUresult>(expected), (call))

namespace harness {

class Gpu {
 public:
  explicit Gpu(int ordinal = 0);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  CUdevice device = 0;
  CUcontext context = nullptr;
};

class GpuTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  CUcontext context() const { return gpu_->context; }
  CUdevice device() const { return gpu_->device; }

 private:
  std::unique_ptr<Gpu> gpu_;
};

class Stream {
 public:
  explicit Stream(unsigned flags = CU_STREAM_NON_BLOCKING) { CHECK_CU(0, driver().StreamCreate(&stream_, flags)); }
  ~Stream() { Destroy(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator CUstream() const { return stream_; }
  void Destroy() {
    if (stream_ != nullptr) driver().StreamDestroy(std::exchange(stream_, nullptr));
  }
  CUresult Synchronize() const { return driver().StreamSynchronize(stream_); }

 private:
  CUstream stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags = CU_EVENT_DISABLE_TIMING) { CHECK_CU(0, driver().EventCreate(&event_, flags)); }
  ~Event() { driver().EventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  operator CUevent() const { return event_; }

 private:
  CUevent event_ = nullptr;
};

// A block of cuMemAlloc.
class DeviceBlock {
 public:
  explicit DeviceBlock(std::size_t bytes) : size_(bytes) { CHECK_CU(0, driver().MemAlloc(&address_, bytes)); }
  ~DeviceBlock() {
    if (address_ != 0) driver().MemFree(address_);
  }
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;

  operator CUdeviceptr() const { return address_; }
  std::size_t size() const { return size_; }
  CUdeviceptr Release() { return std::exchange(address_, 0); }  // the test frees it itself

 private:
  CUdeviceptr address_ = 0;
  std::size_t size_;
};

// Pinned host words that the device sees too: flags for k_wait_flag, counters for the checks.
class SharedWord {
 public:
  SharedWord();
  ~SharedWord();
  SharedWord(const SharedWord&) = delete;
  SharedWord& operator=(const SharedWord&) = delete;

  CUdeviceptr on_device() const { return on_device_; }
  void Set(std::uint32_t value);
  std::uint32_t Get() const;

 private:
  std::uint32_t* word_ = nullptr;
  CUdeviceptr on_device_ = 0;
};

// The bytes of device memory, copied to the host.
std::vector<std::uint8_t> Bytes(CUdeviceptr address, std::size_t count);

class Stopwatch {
 public:
  double Milliseconds() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  void Restart() { start_ = std::chrono::steady_clock::now(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace harness
