#!/bin/sh
# Runs the contract's tests on whatever driver is there, natively and under Cushion: tests/contract/run.sh BUILD_DIR
# One line for each setting; a failing one shows its failures above. Exit code 1 if any failed.
set -u
build=${1:?usage: $0 BUILD_DIR}
failed=0

# The summary's figure: "[  PASSED  ] 12 tests."
count() { sed -n "s/^\[ *$1 *\] \([0-9][0-9]*\) tests\{0,1\}[.,].*/\1/p" "$log" | tail -1 | grep . || echo 0; }

setting() { # NAME VARIABLE=VALUE...
  name=$1
  shift
  log=$(mktemp)
  env "$@" timeout 300 "$build/tests/contract_tests" --gtest_brief=1 >"$log" 2>&1
  code=$?
  [ $code -eq 0 ] || { failed=1; cat "$log"; }
  printf 'contract.%s: exit %d, %d passed, %d failed, %d skipped\n' "$name" "$code" \
    "$(count PASSED)" "$(grep -c '^\[  FAILED  \] .* ms)$' "$log")" "$(count SKIPPED)"
  rm -f "$log"
}

setting native CUSHION_DISABLE=
setting cushion LD_PRELOAD="$build/libcushion.so"
setting deferred LD_PRELOAD="$build/libcushion.so" CUSHION_FREE=deferred
exit $failed
