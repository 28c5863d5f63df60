// Launches of the test kernels (tests/kernels/test_kernels.cu says what each does), on the current context.
//
// The module is loaded once for each context, at its first launch; call LoadKernels before a capture begins, or where
// the load's own memory would disturb what is measured.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/harness/driver.h"

namespace harness {

constexpr std::uint64_t kMillisecond = 1'000'000;  // the kernels count nanoseconds

CUresult LoadKernels();

CUresult LaunchHold(CUstream stream, std::uint64_t ns);
CUresult LaunchFill(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, std::uint64_t ns = 0);
CUresult LaunchFillHoldCheck(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, std::uint64_t ns,
                             CUdeviceptr bad);
CUresult LaunchCheck(CUstream stream, CUdeviceptr p, std::uint64_t n, std::uint32_t value, CUdeviceptr bad);
CUresult LaunchCopy(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::uint64_t n, std::uint64_t ns = 0);
CUresult LaunchWaitFlag(CUstream stream, CUdeviceptr flag, std::uint64_t timeout_ns = 5'000 * kMillisecond);
CUresult LaunchPrint(CUstream stream, std::uint32_t times);

}  // namespace harness
