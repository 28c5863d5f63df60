"""A gradient-descent loop in JAX. With XLA_PYTHON_CLIENT_ALLOCATOR=platform each buffer is an allocation."""

import os
import sys
import zlib

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
try:
    import jax
    import jax.numpy as jnp
    import numpy
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)
if jax.default_backend() != "gpu":
    print("SKIP: this JAX sees no GPU")
    sys.exit(77)


def loss(parameters, inputs, targets):
    (first, second) = parameters
    return jnp.mean((jnp.tanh(inputs @ first) @ second - targets) ** 2)


random = numpy.random.default_rng(11)
parameters = tuple(jnp.asarray(random.standard_normal(shape, dtype=numpy.float32) / 16) for shape in ((256, 512), (512, 8)))
step = jax.jit(lambda p, x, y: jax.tree_util.tree_map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x, y)))
for index in range(20):
    inputs = jnp.asarray(random.standard_normal((128, 256), dtype=numpy.float32))
    targets = jnp.asarray(random.standard_normal((128, 8), dtype=numpy.float32))
    parameters = step(parameters, inputs, targets)
    print(f"step {index}: loss {float(loss(parameters, inputs, targets)).hex()}")
print("weights", *(f"{zlib.crc32(numpy.asarray(weight).tobytes()):08x}" for weight in parameters))
