#!/usr/bin/env bash
# Configures and builds into build/. usage: setup/build.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")/.."
libtorch=$(setup/libtorch.sh)

# The compiler's cache lives in the user's cache folder; these settings let it
# serve a precompiled header and a second checkout.
export CCACHE_DIR=${CCACHE_DIR:-${ECHELON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/echelon}/ccache}
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}

if [ ! -e build/build.ninja ]; then
  echo "build: configuring into build/"
fi
cmake --preset release -DECHELON_LIBTORCH="$libtorch" >build.log 2>&1 || {
  cat build.log >&2
  exit 1
}
mkdir -p build && mv build.log build/configure.log
echo "build: compiling (the first time takes some minutes; ccache keeps the result)"
cmake --build build -j "${1:-$(nproc)}"
