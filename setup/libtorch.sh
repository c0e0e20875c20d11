#!/usr/bin/env bash
# Puts LibTorch into the user's cache and prints its folder, the one to give to
# CMake as ECHELON_LIBTORCH. Nothing is fetched when it is there already; what an
# interrupted run left is removed, and wheels that it had fetched are used.
# usage: setup/libtorch.sh [--version VERSION]
#
#   ECHELON_LIBTORCH   another copy to use: a folder with include/ and lib/
#   ECHELON_CACHE      where to keep it (default: XDG_CACHE_HOME or ~/.cache, /echelon)
set -euo pipefail
source "$(dirname "$0")/fetch.sh"

default=2.11.0
version=$default
case $#/${1:-}/${2:-} in
  0//) ;;
  2/--version/[0-9]*.[0-9]*.[0-9]*) version=$2 ;;
  *)
    say "cannot read: $*"
    say "usage: setup/libtorch.sh [--version VERSION], such as --version 2.15.0"
    exit 2
    ;;
esac
if [ -n "${ECHELON_LIBTORCH:-}" ]; then
  if [ ! -e "$ECHELON_LIBTORCH/lib/libtorch_cpu.so" ]; then
    say "ECHELON_LIBTORCH=$ECHELON_LIBTORCH has no lib/libtorch_cpu.so"
    say "it is the folder with include/ and lib/: site-packages/torch of a PyTorch $version"
    exit 1
  fi
  if [ $# -gt 0 ] && [ "$(sed -n 's/^#define TORCH_VERSION_[MP][A-Z]* //p' \
    "$ECHELON_LIBTORCH/include/torch/headeronly/version.h" | paste -sd.)" != "$version" ]; then
    say "ECHELON_LIBTORCH=$ECHELON_LIBTORCH is not the LibTorch $version of --version"
    say "unset ECHELON_LIBTORCH, or let it name a PyTorch $version"
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
kept=$cache/wheels
if [ "$version" != "$default" ]; then
  wheels=("torch==$version")
  kept=$cache/wheels-$version
fi
flags=(--no-deps)
what="about 750 MB" megabytes=3000
if [ -e /dev/nvidiactl ]; then
  wheels=("torch==$version")
  flags=()
  what="about 2.6 GB, with CUDA's libraries" megabytes=9000
fi

# asks_for NAME PATTERN: what the fetched wheels of NAME ask for, as PACKAGE==VERSION.
asks_for() {
  "$home.part/venv/bin/python" -c '
import pathlib, re, sys, zipfile
folder, name, wanted = sys.argv[1:]
for path in pathlib.Path(folder).glob(name + "-*.whl"):
    wheel = zipfile.ZipFile(path)
    [metadata] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    asked = re.findall(r"^Requires-Dist: ([\w-]+)(?:\[.*?\])?(==[\w.*]+)",
                       wheel.read(metadata).decode(), re.M)
    print(*sorted({"".join(a) for a in asked if re.fullmatch(wanted, a[0])}))
' "$kept" "$1" "$2"
}

fetch_wheel() {
  say "  $1"
  pip "$home.part/venv/bin/python" download "${flags[@]}" --no-cache-dir \
    --dest "$kept" "$1"
}

make_cache
take_turns libtorch
if ! is_complete; then
  rm -rf "$home" "$home.part"
  need_space "$cache" "$megabytes" "LibTorch $version"
  say "fetching LibTorch $version into $home ($what, once)"
  mkdir -p "$home.part/tmp" "$kept"
  trap 'rm -rf "$home.part"' EXIT
  trap 'say "interrupted; run the same command again to resume"; exit 130' INT TERM
  export TMPDIR=$home.part/tmp
  python3 -m venv "$home.part/venv" >&2
  # One wheel at a time: an interrupted run keeps those that it has.
  for wheel in "${wheels[@]}"; do fetch_wheel "$wheel"; done
  # Another version than the default says itself which CUDA and NCCL it was built
  # with. The toolkit's wheel is empty: it names the version of each part.
  if [ "$version" != "$default" ] && [ ${#flags[@]} -gt 0 ]; then
    for wheel in $(asks_for torch 'cuda-toolkit|nvidia-nccl-cu\d+'); do
      fetch_wheel "$wheel"
      wheels+=("$wheel")
    done
    for wheel in $(asks_for cuda_toolkit 'nvidia-cuda-(runtime|cupti)'); do
      fetch_wheel "$wheel"
      wheels+=("$wheel")
    done
    if [ ${#wheels[@]} -ne 5 ]; then
      say "torch==$version does not name one CUDA toolkit and one NCCL; this script knows"
      say "the wheels of $default to 2.15.0. It found: ${wheels[*]}"
      exit 1
    fi
  fi
  say "  unpacking"
  pip "$home.part/venv/bin/python" install --no-compile "${flags[@]}" --no-index \
    --find-links "$kept" --target "$home.part/files" "${wheels[@]}"
  touch "$home.part/files/complete"
  mv "$home.part/files" "$home"
  rm -rf "$kept"
fi
echo "$home/torch"
