#!/bin/bash
# gpu.sh OUTDIR [--full] [STEP...]: everything that a GPU machine can say, in one go: builds release, runs all tests,
# the torture program, compute-sanitizer, and the benchmarks (eight minutes of them, or with --full all of them). STEP
# names what to do of it: build, contract, tests, torture, sanitizer, bench. CUSHION_TORTURE_SECONDS (5) is how long the
# torture runs under each setting. OUTDIR gets the log of each step, the tests' results as JUnit XML, the torture's and
# the benchmarks' JSON, and machine.json: GPU, driver, CPU, compilers, commit (CUSHION_COMMIT where there is no git).
#
# Installs nothing and asks no network. RMM is measured too if build/rmm is there (tools/rmm.sh), and compute-sanitizer
# may lie in build/sanitizer (tools/sanitizer.sh). A step that fails does not stop the next; the exit status is then 1.
set -uo pipefail
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
scale=--goals
[ "${1:-}" != --full ] || { scale=; shift; }
steps=" ${*:-build contract tests torture sanitizer bench} "
for name in $steps; do
  case $name in build | contract | tests | torture | sanitizer | bench) ;; *)
    echo "gpu.sh: $name is no step: build, contract, tests, torture, sanitizer, bench" >&2
    exit 2
    ;;
  esac
done
cd "$(dirname "$0")/.." || exit 2
build=build/release
commit=${CUSHION_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}
torture_seconds=${CUSHION_TORTURE_SECONDS:-5}
unset CUSHION_COMMIT CUSHION_TORTURE_SECONDS # Cushion reads every variable of that prefix
summary=()
failures=0

# step NAME SECONDS COMMAND...: runs it, if it is wanted, with its output in OUTDIR/NAME.log too; status 77 means
# skipped.
step() {
  local name=$1 limit=$2 status start=$SECONDS verdict=passed
  shift 2
  case $steps in *" $name "*) ;; *) return ;; esac
  printf '\n== %s ==\n' "$name"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) ;;
    77) verdict=skipped ;;
    124 | 137) verdict="FAILED: out of its $limit s" ;;
    *) verdict="FAILED with status $status" ;;
  esac
  case $verdict in FAILED*) failures=$((failures + 1)) ;; esac
  summary+=("$(printf '%-10s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
}

gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
first_line() { "$@" 2>/dev/null | head -n 1; }
text() { printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
describe_machine() {
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  printf '{\n  "gpu": %s,\n  "gpu_memory": %s,\n  "driver": %s,\n  "cpu": %s,\n  "cpus": %s,\n' "$(text "$(gpu name)")" \
    "$(text "$(gpu memory.total)")" "$(text "$(gpu driver_version)")" \
    "$(text "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)")" "$(nproc)"
  printf '  "kernel": %s,\n  "compiler": %s,\n  "nvcc": %s,\n  "commit": %s,\n  "date": %s\n}\n' "$(text "$(uname -r)")" \
    "$(text "$(first_line c++ --version)")" "$(text "$("$nvcc" --version | sed -n 's/.*release //p')")" \
    "$(text "$commit")" "$(text "$(date -u +%FT%TZ)")"
}

describe_machine | tee "$out/machine.json"
step build 180 sh -c "cmake --preset release && cmake --build --preset release --parallel $(nproc) -- -k 0"
step contract 320 tests/contract/run.sh "$build"
step tests 260 ctest --preset release --parallel 4 --output-junit "$out/tests.xml"
step torture $((14 * torture_seconds + 240)) \
  python3 tests/gpu/torture.py "$build" --seconds "$torture_seconds" --json "$out/torture.json"
step sanitizer 400 python3 tests/gpu/sanitizer.py "$build"
# shellcheck disable=SC2086  # no scale is no argument
step bench "$([ -n "$scale" ] && echo 480 || echo 580)" \
  env CUSHION_COMMIT="$commit" python3 bench/run.py "$build" "$out/bench" $scale

printf '\n== summary ==\n'
machine=$(gpu name)
printf '%s\n' "${machine:-no GPU}, driver $(gpu driver_version)" "${summary[@]}" | tee "$out/summary.txt"
[ "$failures" -eq 0 ]
