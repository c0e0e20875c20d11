#!/usr/bin/env bash
# Puts LibTorch into the user's cache and prints its folder, the one to give to
# CMake as ECHELON_LIBTORCH. Nothing is fetched when it is there already; what an
# interrupted run left is removed, and wheels that it had fetched are used.
#
#   ECHELON_LIBTORCH   another copy to use: a folder with include/ and lib/
#   ECHELON_CACHE      where to keep it (default: XDG_CACHE_HOME or ~/.cache, /echelon)
set -euo pipefail
source "$(dirname "$0")/fetch.sh"

version=2.11.0
if [ -n "${ECHELON_LIBTORCH:-}" ]; then
  if [ ! -e "$ECHELON_LIBTORCH/lib/libtorch_cpu.so" ]; then
    say "ECHELON_LIBTORCH=$ECHELON_LIBTORCH has no lib/libtorch_cpu.so"
    say "it is the folder with include/ and lib/: site-packages/torch of a PyTorch $version"
    exit 1
  fi
  echo "$ECHELON_LIBTORCH"
  exit 0
fi

home=$cache/libtorch-$version
# A machine that got its GPU after the set-up fetches CUDA's libraries as well.
is_complete() {
  [ -e "$home/complete" ] &&
    { [ ! -e /dev/nvidiactl ] || [ -e "$home/nvidia/cudnn" ]; }
}
if is_complete; then
  echo "$home/torch"
  exit 0
fi

# The CPU library links the CUDA runtime and CUPTI; NCCL is taken for its
# header. A machine with a GPU takes everything that the wheel asks for.
wheels=("torch==$version" "nvidia-cuda-runtime==13.0.96" "nvidia-cuda-cupti==13.0.85" "nvidia-nccl-cu13==2.28.9")
flags=(--no-deps)
what="about 750 MB" megabytes=3000
if [ -e /dev/nvidiactl ]; then
  wheels=("torch==$version")
  flags=()
  what="about 2.6 GB, with CUDA's libraries" megabytes=9000
fi

make_cache
take_turns libtorch
if ! is_complete; then
  rm -rf "$home" "$home.part"
  need_space "$cache" "$megabytes" "LibTorch $version"
  say "fetching LibTorch $version into $home ($what, once)"
  mkdir -p "$home.part/tmp" "$cache/wheels"
  trap 'rm -rf "$home.part"' EXIT
  trap 'say "interrupted; run the same command again to resume"; exit 130' INT TERM
  export TMPDIR=$home.part/tmp
  python3 -m venv "$home.part/venv" >&2
  # One wheel at a time: an interrupted run keeps those that it has.
  for wheel in "${wheels[@]}"; do
    say "  $wheel"
    pip "$home.part/venv/bin/python" download "${flags[@]}" --no-cache-dir \
      --dest "$cache/wheels" "$wheel"
  done
  say "  unpacking"
  pip "$home.part/venv/bin/python" install --no-compile "${flags[@]}" --no-index \
    --find-links "$cache/wheels" --target "$home.part/files" "${wheels[@]}"
  touch "$home.part/files/complete"
  mv "$home.part/files" "$home"
  rm -rf "$cache/wheels"
fi
echo "$home/torch"
