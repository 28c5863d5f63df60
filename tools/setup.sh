#!/bin/bash
# setup.sh [check]: makes a Debian 12 or Ubuntu 24.04 machine able to build Cushion. Run it, or source it for the
# environment too (CUDAToolkit_ROOT and PATH for a CUDA Toolkit that is not in a default place).
#
# It installs what tools/deps lists and is missing, and says so; where nothing is missing it changes nothing and
# asks no network. With the argument `check`, also what CI's checks need. A CUDA Toolkit of 12.5 or later is taken
# from where it is; else from apt, where a repository has one; else from NVIDIA's packages on PyPI, into
# build/cuda-toolkit.
set -euo pipefail

cushion_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cushion_cuda=13.0 # the release installed where none is found

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "needs root to run: $* (run it yourself, or install sudo)"
  fi
}

apt_refresh() { # once a run
  [ -n "${cushion_apt_fresh:-}" ] || as_root apt-get update -qq
  cushion_apt_fresh=1
}

apt_install() {
  command -v apt-get >/dev/null || die "this is no Debian or Ubuntu system; install by hand: $*"
  apt_refresh
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

present() { # a witness of tools/deps
  case $1 in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# install_groups GROUP...: what tools/deps lists for the groups and is missing.
install_groups() {
  local group package witness why missing=()
  while read -r group package witness why; do
    case " $* " in *" $group "*) ;; *) continue ;; esac
    present "$witness" && continue
    say "installs $package: $why"
    missing+=("$package")
  done < <(grep -v '^#' "$cushion_root/tools/deps")
  [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
}

# The root of a CUDA Toolkit by its nvcc, if that is of 12.5 or later.
toolkit_of() {
  local nvcc release
  nvcc=$(readlink -f "$1" 2>/dev/null) && [ -x "$nvcc" ] || return 1
  release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  if [ "$(printf '12.5\n%s\n' "$release" | sort -V | head -n 1)" != 12.5 ]; then
    say "leaves aside CUDA Toolkit $release ($nvcc): 12.5 or later is needed"
    return 1
  fi
  dirname "$(dirname "$nvcc")"
}

find_toolkit() {
  local nvcc
  for nvcc in "${CUDAToolkit_ROOT:+$CUDAToolkit_ROOT/bin/nvcc}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc \
    /usr/local/cuda-*/bin/nvcc "$cushion_root/build/cuda-toolkit/root/bin/nvcc"; do
    if toolkit_of "$nvcc"; then return; fi
  done
  return 1
}

toolkit_from_apt() {
  local release=${cushion_cuda/./-} packages
  packages=("cuda-nvcc-$release" "cuda-cudart-dev-$release" "cuda-driver-dev-$release")
  command -v apt-cache >/dev/null || return 1
  apt-cache show "${packages[@]}" >/dev/null 2>&1 || return 1
  say "installs ${packages[*]}: the CUDA compiler, headers and runtime"
  apt_install "${packages[@]}"
}

# NVIDIA's wheels together make a toolkit's tree, but for the names that a linker looks for.
toolkit_from_pypi() {
  local home=$cushion_root/build/cuda-toolkit package packages=()
  install_groups toolkit
  for package in nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl; do
    packages+=("$package==$cushion_cuda.*")
  done
  say "installs NVIDIA's CUDA compiler, headers and runtime $cushion_cuda from PyPI into $home: no CUDA Toolkit was found"
  rm -rf "$home"
  python3 -m venv "$home/venv"
  "$home/venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
  ln -s "$(dirname "$(dirname "$(ls "$home"/venv/lib/python3*/site-packages/nvidia/*/bin/nvcc)")")" "$home/root"
  ln -s lib "$home/root/lib64"
  ln -s "$(basename "$(ls "$home"/root/lib/libcudart.so.*)")" "$home/root/lib/libcudart.so"
}

cushion_groups=(build)
[ "${1:-}" != check ] || cushion_groups+=(check)
install_groups "${cushion_groups[@]}"
# libFuzzer comes in a package that is named for clang's version.
if [ "${1:-}" = check ] &&
  ! echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' | clang++ -fsanitize=fuzzer -x c++ - -o /dev/null 2>/dev/null; then
  cushion_fuzzer=libclang-rt-$(clang++ -dumpversion | cut -d . -f 1)-dev
  say "installs $cushion_fuzzer: CI fuzzes with it"
  apt_install "$cushion_fuzzer"
fi
if ! cushion_toolkit=$(find_toolkit); then
  toolkit_from_apt || toolkit_from_pypi
  cushion_toolkit=$(find_toolkit) || die "found no CUDA Toolkit after installing one; set CUDAToolkit_ROOT to one of 12.5 or later"
fi
export CUDAToolkit_ROOT=$cushion_toolkit
case ":$PATH:" in
  *":$cushion_toolkit/bin:"*) ;;
  *) export PATH=$cushion_toolkit/bin:$PATH ;;
esac
