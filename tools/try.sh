#!/bin/bash
# try.sh: from a clean clone to a CUDA program served by Cushion. Sets the machine up, builds, then runs an
# unmodified program natively and under Cushion, and shows both times and the report at exit.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/setup.sh ""
cmake --preset release >/dev/null
build_targets() { cmake --build --preset release --parallel "$(nproc)" --target cushion cushion_shim "$@"; }

build=build/release
if nvidia-smi -L >/dev/null 2>&1; then
  build_targets gpu_demo
  program=$build/tests/gpu_demo
  nvidia-smi -L
  echo "The program: $program, as nvcc builds it (static CUDA runtime)."
else
  build_targets emulated_driver driver_demo
  program=$build/tests/driver_demo
  echo "This machine has no NVIDIA GPU (nvidia-smi finds none). The program: $program, which speaks the driver API,"
  echo "over the emulated driver in host memory. Its times say nothing about a GPU."
  export LD_LIBRARY_PATH=$PWD/$build/emulator${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

printf '\n$ %s\n' "$program"
"$program"
printf '\n$ %s run --track on -- %s\n' "$build/cushion" "$program"
"$build/cushion" run --track on -- "$program"
