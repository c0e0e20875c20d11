#!/usr/bin/env bash
# Configures and builds into build/. usage: setup/build.sh [JOBS] [TARGET ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source setup/fetch.sh
libtorch=$(setup/libtorch.sh)
jobs=${1:-$(nproc)}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(all)

# The compiler's cache lives in the user's cache folder; these settings let it
# serve a precompiled header and a second checkout.
export CCACHE_DIR=${CCACHE_DIR:-$cache/ccache}
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}

mkdir -p build
if [ ! -e build/build.ninja ]; then
  echo "build: configuring into build/"
  need_space build 4000 "the build"
fi
if ! cmake --preset release -DECHELON_LIBTORCH="$libtorch" >build/configure.log 2>&1; then
  cat build/configure.log >&2
  exit 1
fi
if ! ninja -C build -n "${targets[@]}" 2>/dev/null | grep -q 'no work to do'; then
  echo "build: compiling (the first time takes some minutes; ccache keeps the result)"
fi
cmake --build build -j "$jobs" --target "${targets[@]}"
