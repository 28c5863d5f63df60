#!/bin/bash
# rmm.sh [DIR]: fetches RMM, which the benchmarks measure beside Cushion, from PyPI into DIR (build/rmm): its headers
# (CCCL's with them) and libraries. It installs nothing, and everything builds without it; the folder may be copied to
# a machine without network.
set -euo pipefail
dir=${1:-$(dirname "$0")/../build/rmm}
usage() { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -le 1 ] && [ "${dir#-}" = "$dir" ] || usage
if [ -e "$dir" ] && [ ! -d "$dir/include/rmm" ]; then
  echo "rmm.sh: $dir is there and holds no RMM: it is left alone" >&2
  exit 2
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
# The benchmarks are written for this version's resources; RMM's interface changes between releases.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$wheels" \
  'librmm-cu13==26.10.*' 'rapids-logger==0.3.*'
rm -rf "$dir"
mkdir -p "$dir/lib64"
for wheel in "$wheels"/*.whl; do
  python3 -m zipfile -e "$wheel" "$wheels/unpacked"
done
for package in librmm rapids_logger; do
  cp -R "$wheels/unpacked/$package/include" "$dir"
  cp "$wheels/unpacked/$package"/lib64/*.so "$dir/lib64"
done
printf '%s: RMM %s, %s\n' "$dir" "$(cat "$wheels/unpacked/librmm/VERSION")" "$(du -sh "$dir" | cut -f 1)"
