#!/usr/bin/env bash
# Configures and builds into build/; with another version of LibTorch than the
# default, into build-VERSION/.
# usage: setup/build.sh [--libtorch VERSION] [JOBS] [--configure | TARGET ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source setup/fetch.sh
build=build wanted=()
if [ "${1:-}" = --libtorch ]; then
  build=build-${2:-} wanted=(--version "${2:-}")
  shift "$(($# < 2 ? $# : 2))"
fi
libtorch=$(setup/libtorch.sh "${wanted[@]}")
jobs=${1:-$(nproc)}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(all)

# The compiler's cache lives in the user's cache folder; these settings let it
# serve a precompiled header and a second checkout.
export CCACHE_DIR=${CCACHE_DIR:-$cache/ccache}
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}

mkdir -p "$build"
if [ ! -e "$build/build.ninja" ]; then
  echo "build: configuring into $build/"
  need_space "$build" 4000 "the build"
fi
# `make extras` brings Arrow, for the tests of Parquet.
arrow=$(find "$cache/pytorch-2.11.0/lib" -maxdepth 3 -name pyarrow 2>/dev/null | head -n 1 || true)
if ! cmake --preset release -B "$build" -DECHELON_LIBTORCH="$libtorch" \
  ${arrow:+-DECHELON_ARROW="$arrow"} >"$build/configure.log" 2>&1; then
  cat "$build/configure.log" >&2
  exit 1
fi
[ "${targets[0]}" != --configure ] || exit 0
if ninja -C "$build" -n "${targets[@]}" 2>/dev/null | grep -q 'no work to do'; then
  exit 0
fi

# One line says how far it is: on a terminal it is written over, elsewhere it comes
# at each tenth. What the compiler says is shown whole.
terminal=0
[ ! -t 1 ] || terminal=1
ninja -C "$build" -j "$jobs" "${targets[@]}" 2>&1 | awk -v terminal="$terminal" '
  /^ninja: Entering directory/ || /^ninja: build stopped/ { next }
  match($0, /^\[[0-9]+\/[0-9]+\]/) {
    split(substr($0, 2, RLENGTH - 2), n, "/")
    if (terminal) {
      printf "\rbuild: %d of %d ", n[1], n[2]
      fflush()
      open = 1
    } else if (n[2] > 0 && int(10 * n[1] / n[2]) > shown) {
      shown = int(10 * n[1] / n[2])
      printf "build: %d of %d\n", n[1], n[2]
      fflush()
    }
    next
  }
  { if (open) print ""; open = 0; print; fflush() }
  END { if (open) print "" }'
