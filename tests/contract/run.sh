#!/bin/sh
# Runs the contract's tests on whatever driver is there, natively and under Cushion: tests/contract/run.sh BUILD_DIR
# One line for each setting; a failing one shows above it every test that did not pass, also one in which the process
# ended or hung. Exit code 1 if any failed.
set -u
build=${1:?usage: $0 BUILD_DIR}
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# The summary's figure: "[  PASSED  ] 12 tests."
count() { sed -n "s/^\[ *$1 *\] \([0-9][0-9]*\) tests\{0,1\}[.,].*/\1/p" "$log" | tail -1 | grep . || echo 0; }

# The log without the tests that passed.
troubles() {
  awk '/^\[ RUN /        { run = $0; next }
       /^\[       OK \]/ { run = ""; next }
       run != ""         { print run; run = "" }
                         { print }
       END               { if (run != "") print run }' "$log"
}

# The three tests that took longest.
slowest() {
  sed -n 's/^\[ .* \] \([^ ]*\)\(, where .*\)\{0,1\} (\([0-9]*\) ms)$/\3 ms \1/p' "$log" | sort -rn | head -3 | paste -sd, -
}

setting() { # NAME VARIABLE=VALUE...
  name=$1
  shift
  started=$(date +%s)
  env "$@" timeout --kill-after=5 60 "$build/tests/contract_tests" >"$log" 2>&1
  code=$?
  [ $code -eq 0 ] || { failed=1; troubles; }
  printf 'contract.%s: exit %d, %d passed, %d failed, %d skipped in %d s (%s)\n' "$name" "$code" "$(count PASSED)" \
    "$(grep -c '^\[  FAILED  \] .* ms)$' "$log")" "$(count SKIPPED)" $(($(date +%s) - started)) "$(slowest)"
}

setting native CUSHION_DISABLE=
setting cushion LD_PRELOAD="$build/libcushion.so"
setting deferred LD_PRELOAD="$build/libcushion.so" CUSHION_FREE=deferred
setting auto LD_PRELOAD="$build/libcushion.so" CUSHION_FREE=auto
setting stacks LD_PRELOAD="$build/libcushion.so" CUSHION_TRACK=stacks
setting vmm LD_PRELOAD="$build/libcushion.so" CUSHION_BACKING=vmm
setting arena LD_PRELOAD="$build/libcushion.so" CUSHION_ALLOCATOR=arena
setting binning LD_PRELOAD="$build/libcushion.so" CUSHION_ALLOCATOR=binning
setting async LD_PRELOAD="$build/libcushion.so" CUSHION_ALLOCATOR=async
exit $failed
