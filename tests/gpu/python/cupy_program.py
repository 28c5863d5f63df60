"""Array work in CuPy, with integers so that sums are exact; `--no-pool` takes CuPy's own pool away, so that every
array is a cudaMalloc, and `--async-pool` makes every one a cudaMallocAsync."""

import sys
import zlib

try:
    import cupy
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)

if "--no-pool" in sys.argv:
    cupy.cuda.set_allocator(None)
if "--async-pool" in sys.argv:
    cupy.cuda.set_allocator(cupy.cuda.malloc_async)

scale = cupy.ElementwiseKernel("int64 x, int64 k", "int64 y", "y = x * k % 1000003", "scale")
streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
sums = []
for step in range(30):
    with streams[step % len(streams)] as stream:
        values = scale(cupy.arange(100000 + 1000 * step, dtype=cupy.int64), 7919 + step)
        sorted_values = cupy.sort(values)
        kept = sorted_values[sorted_values % 3 == 0]
        matrix = (values[:65536] % 8).astype(cupy.float64).reshape(256, 256)
        product = matrix @ matrix.T
        sums.append((int(kept.sum()), int(product.sum()), zlib.crc32(cupy.asnumpy(sorted_values).tobytes())))
        stream.synchronize()
for step, (kept, product, crc) in enumerate(sums):
    print(f"step {step}: {kept} {product} {crc:08x}")
