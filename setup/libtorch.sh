#!/usr/bin/env bash
# Puts LibTorch into the user's cache and prints its folder, the one to give to
# CMake as ECHELON_LIBTORCH. Nothing is fetched when it is there already.
#
#   ECHELON_LIBTORCH   another copy to use: a folder with include/ and lib/
#   ECHELON_CACHE      where to keep it (default: XDG_CACHE_HOME or ~/.cache, /echelon)
set -euo pipefail

version=2.11.0
if [ -n "${ECHELON_LIBTORCH:-}" ]; then
  if [ ! -e "$ECHELON_LIBTORCH/lib/libtorch_cpu.so" ]; then
    echo "set-up: ECHELON_LIBTORCH=$ECHELON_LIBTORCH has no lib/libtorch_cpu.so" >&2
    exit 1
  fi
  echo "$ECHELON_LIBTORCH"
  exit 0
fi

cache=${ECHELON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/echelon}
home=$cache/libtorch-$version
if [ -e "$home/complete" ]; then
  echo "$home/torch"
  exit 0
fi

# The CPU library links the CUDA runtime and CUPTI; NCCL is taken for its
# header. A machine with a GPU takes everything that the wheel asks for.
wheels=("torch==$version" "nvidia-cuda-runtime==13.0.96" "nvidia-cuda-cupti==13.0.85" "nvidia-nccl-cu13==2.28.9")
flags=(--no-deps)
if [ -e /dev/nvidiactl ]; then
  wheels=("torch==$version")
  flags=()
fi

mkdir -p "$cache"
exec 9>"$cache/libtorch.lock"
flock 9
if [ ! -e "$home/complete" ]; then
  echo "set-up: fetching LibTorch $version into $home (about 750 MB, once)" >&2
  rm -rf "$home" "$home.part"
  mkdir -p "$home.part"
  python3 -m venv "$home.part/venv" >&2
  "$home.part/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-compile "${flags[@]}" --target "$home.part" "${wheels[@]}" >&2
  rm -rf "$home.part/venv"
  touch "$home.part/complete"
  mv "$home.part" "$home"
fi
echo "$home/torch"
