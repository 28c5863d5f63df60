#!/bin/bash
# sanitizer.sh [DIR]: fetches NVIDIA's compute-sanitizer from PyPI into DIR (build/sanitizer), for machines whose CUDA
# came without it. It installs nothing; the folder may be copied to a machine without network.
set -euo pipefail
dir=${1:-$(dirname "$0")/../build/sanitizer}
usage() { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -le 1 ] && [ "${dir#-}" = "$dir" ] || usage
if [ -e "$dir" ] && [ ! -e "$dir/compute-sanitizer" ]; then
  echo "sanitizer.sh: $dir is there and holds no compute-sanitizer: it is left alone" >&2
  exit 2
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
# Wheels before 13.5 came without the helpers that start the program.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$wheels" \
  'nvidia-cuda-sanitizer-api==13.5.*'
python3 -m zipfile -e "$wheels"/*.whl "$wheels/unpacked"
rm -rf "$dir"
mkdir -p "$dir"
cp "$wheels"/unpacked/nvidia/*/compute-sanitizer/{compute-sanitizer,TreeLauncher*,lib*.so} "$dir"
chmod +x "$dir"/compute-sanitizer "$dir"/TreeLauncher*
printf '%s: %s, %s\n' "$dir" "$("$dir/compute-sanitizer" --version | grep -i version)" "$(du -sh "$dir" | cut -f 1)"
