"""Kernels compiled by numba over arrays that live for one round, in several streams."""

import sys
import zlib

try:
    import numpy

    if not hasattr(numpy, "row_stack"):  # gone from NumPy 2.5; numba-cuda looks it up when it is imported
        numpy.row_stack = numpy.vstack
    from numba import cuda
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)
if not cuda.is_available():
    print("SKIP: numba sees no GPU")
    sys.exit(77)


@cuda.jit
def step(source, target, factor):
    i = cuda.grid(1)
    if i < source.size:
        target[i] = (source[i] * factor + i) % 1000003


streams = [cuda.stream() for _ in range(3)]
for index in range(20):
    stream = streams[index % len(streams)]
    host = numpy.arange(50000 + 777 * index, dtype=numpy.int64)
    source = cuda.to_device(host, stream=stream)
    target = cuda.device_array(host.shape, dtype=numpy.int64, stream=stream)
    blocks = (host.size + 255) // 256
    step[blocks, 256, stream](source, target, 31 + index)
    step[blocks, 256, stream](target, source, 17)
    result = source.copy_to_host(stream=stream)
    stream.synchronize()
    print(f"round {index}: {zlib.crc32(result.tobytes()):08x} {int(result.sum())}")
