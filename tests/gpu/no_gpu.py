"""Whether there is a GPU to run on."""

import ctypes

SKIPPED = 77  # the exit code that ctest takes for skipped


def no_gpu():
    """Why there is no GPU to run on; empty if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    result, count = driver.cuInit(0), ctypes.c_int(0)
    if result != 0:
        return f"the CUDA driver does not start (cuInit answers {result})"
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver sees no GPU"
    return ""
