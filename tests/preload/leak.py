"""A Python program that leaks from places that it knows, each marked with `LEAK` in the line of the call.

    leak.py gil|free        through ctypes, which keeps Python's lock during the call, or gives it away
"""
import ctypes
import sys
import threading

cuda = (ctypes.PyDLL if sys.argv[1] == "gil" else ctypes.CDLL)("libcuda.so.1")


def check(result):
    if result != 0:
        sys.exit(f"error {result}")


def allocate(size):
    block = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)))  # LEAK allocate
    return block.value


class Model:
    def __init__(self):
        self.weights = [
            allocate(size) for size in (65537,)]  # LEAK Model.__init__

    def größe(self):
        return allocate(65538)  # LEAK Model.größe


def in_thread():
    check(cuda.cuCtxSetCurrent(context))
    for block in (allocate(4096) for _ in range(5)):
        check(cuda.cuMemFree_v2(ctypes.c_uint64(block)))
    exec("def made():\n\n  return allocate(65539)\nmade()", globals())  # line 3 of <string>


check(cuda.cuInit(0))
context = ctypes.c_void_p()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
Model().größe()  # LEAK <module>
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
try:
    raise KeyError("kept")
except KeyError as error:
    allocate(100)
    print(repr(error), sys.exc_info()[0].__name__)
