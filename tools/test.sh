#!/bin/bash
# test.sh [--preset NAME]...: sets the machine up, builds, and runs every test; the presets are those of
# CMakePresets.json (release if none is named). GPU tests print SKIP where there is no GPU.
#
# With CI=true and no preset named it is the whole of CI: formatting, clang-tidy, then the tests under
# AddressSanitizer and ThreadSanitizer, the fuzz targets for a few seconds each, and the release build's tests last. Stops at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."

presets=()
while [ $# -gt 0 ]; do
  case $1 in
    --preset)
      presets+=("${2:?--preset needs a name}")
      shift 2
      ;;
    *)
      sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
      exit 2
      ;;
  esac
done
checks=
if [ ${#presets[@]} -eq 0 ]; then
  presets=(release)
  [ "${CI:-}" != true ] || checks=check presets=(asan tsan fuzz release)
fi

. tools/setup.sh "$checks"

step() { printf '\n== %s ==\n' "$*"; }

# What the failed tests of a build folder printed, once more: a log of which only the end is kept has it then.
tell_failures() {
  awk '/^[0-9]+\/[0-9]+ Testing: / { text = "" }
       { text = text $0 "\n" }
       /^Test Failed\./ { print substr(text, length(text) - 3000) }' "$1/Testing/Temporary/LastTest.log"
}

if [ -n "$checks" ]; then
  step "formatting"
  git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 clang-format --dry-run -Werror
  step "clang-tidy"
  cmake --preset release -B build/tidy -DCMAKE_CXX_COMPILER=clang++ >/dev/null # flags that clang knows
  git ls-files -z 'core/*.cpp' 'shim/*.cpp' 'tools/*.cpp' |
    xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p build/tidy 2> >(grep -v 'warnings generated' >&2)
fi

for preset in "${presets[@]}"; do
  step "$preset"
  cmake --preset "$preset" ${checks:+-DCUSHION_WERROR=ON}
  cmake --build --preset "$preset" --parallel "$(nproc)"
  ctest --preset "$preset" --parallel "$(nproc)" || { tell_failures "build/$preset"; exit 1; }
done

# What Cushion costs the processor, over the emulated driver: figures to look at, nothing to fail on.
results=build/release/bench/emulator-results
[ ! -e $results/summary.json ] || { step "CPU costs" && python3 bench/table.py $results; }
