#!/usr/bin/env bash
# What the set-up scripts do on a machine that lacks something. Stand-ins for
# python3, df, id, dpkg-query and apt-get come first in PATH, so that nothing is
# fetched, and every folder has a space in its name.
# usage: setup_test.sh SOURCE_DIR
set -euo pipefail
if [ -e /dev/nvidiactl ]; then
  echo "skipped: a machine with a GPU fetches other wheels" >&2
  exit 77
fi

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
mkdir -p "$temp/a checkout" "$temp/bin"
cp -r "$1/setup" "$temp/a checkout/"
cd "$temp/a checkout"
log=$temp/log
fail() {
  echo "FAILED: $*" >&2
  cat "$log" >&2
  exit 1
}

# pip, as `python3 -m pip`: FETCH says what a download does. Each one is noted.
# Wheels are not real, so what they ask for is answered here as well.
cat >"$temp/bin/python3" <<'END_PYTHON'
#!/usr/bin/env bash
set -eu
case $2 in
  *Requires-Dist*)
    case $4 in
      torch) echo "cuda-toolkit==13.2.2 nvidia-nccl-cu13==2.30.7" ;;
      cuda_toolkit) echo "nvidia-cuda-cupti==13.2.86.* nvidia-cuda-runtime==13.2.86.*" ;;
    esac
    ;;
  venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  pip)
    verb=$3
    while [ $# -gt 1 ]; do
      case $1 in
        --dest | --target) folder=$2 ;;
        --find-links) wheels=$2 ;;
      esac
      shift
    done
    if [ "$verb" = install ]; then
      for wheel in torch nvidia-cuda-runtime nvidia-cuda-cupti nvidia-nccl-cu13; do
        ls "$wheels/$wheel"* >/dev/null
      done
      mkdir -p "$folder/torch/lib" "$folder/nvidia/cudnn"
      touch "$folder/torch/lib/libtorch_cpu.so"
      exit
    fi
    [ ! -e "$folder/$1.whl" ] || exit 0  # pip keeps a wheel that it has
    echo "$1" >>"$FETCHED"
    case $1/$FETCH in
      nvidia*/no-network) echo "ERROR: Could not find a version" >&2; exit 1 ;;
      nvidia*/interrupt) kill -TERM "$PPID"; exit 1 ;;
    esac
    echo "$1" >"$folder/$1.whl"
    ;;
esac
END_PYTHON
cat >"$temp/bin/df" <<'END_DF'
#!/bin/sh
printf 'Avail\n%s\n' "${FREE_KB:-99999999}"
END_DF
cat >"$temp/bin/id" <<'END_ID'
#!/bin/sh
echo "${USER_ID:-0}"
END_ID
cat >"$temp/bin/dpkg-query" <<'END_DPKG'
#!/bin/sh
exit 1
END_DPKG
cat >"$temp/bin/apt-get" <<'END_APT'
#!/bin/sh
echo "E: Unable to locate package"
exit 100
END_APT
chmod +x "$temp"/bin/*
export PATH=$temp/bin:$PATH ECHELON_CACHE="$temp/a cache" FETCHED=$temp/fetched
export FETCH=works
unset ECHELON_LIBTORCH
home=$ECHELON_CACHE/libtorch-2.11.0

# ends STATUS COMMAND…: runs the command, which must end with that status.
ends() {
  local status=$1 got=0
  shift
  : >"$FETCHED"
  "$@" >"$temp/out" 2>"$log" || got=$?
  [ "$got" -eq "$status" ] || fail "$* ends with $got, not $status"
}
says() { grep -qF -- "$1" "$log" || fail "no word of: $1"; }

echo "no space: nothing is fetched"
FREE_KB=1024000 ends 1 setup/libtorch.sh
says "needs"
says "1000 MB free"
says "set ECHELON_CACHE"
[ ! -s "$FETCHED" ] || fail "it fetched"

echo "a cache that cannot be written"
touch "$temp/a file"
ECHELON_CACHE="$temp/a file/cache" ends 1 setup/libtorch.sh
says "cannot write to $temp/a file/cache"
says "set ECHELON_CACHE"

echo "no network: what was fetched is kept"
FETCH=no-network ends 1 setup/libtorch.sh
says "Could not find a version"
says "run the same command again"
[ ! -e "$home" ] || fail "an incomplete LibTorch looks like a complete one"
[ ! -e "$home.part" ] || fail "what was half done lies around"
[ -e "$ECHELON_CACHE/wheels/torch==2.11.0.whl" ] || fail "the wheel is gone"

echo "interrupted: the same command resumes, and fetches only the rest"
FETCH=interrupt ends 130 setup/libtorch.sh
says "run the same command again to resume"
[ ! -e "$home" ] || fail "an incomplete LibTorch looks like a complete one"
ends 0 setup/libtorch.sh
[ "$(cat "$temp/out")" = "$home/torch" ] || fail "it prints $(cat "$temp/out")"
[ -e "$home/torch/lib/libtorch_cpu.so" ] || fail "LibTorch is not there"
if grep -q '^torch==' "$FETCHED"; then fail "the first wheel was fetched again"; fi

echo "a second run fetches nothing"
ends 0 setup/libtorch.sh
[ ! -s "$FETCHED" ] || fail "it fetched"
[ ! -s "$log" ] || fail "it says something"

echo "a folder that is not complete, as killed or older set-ups left it, is replaced"
rm "$home/complete"
mkdir -p "$home.part"
touch "$home/old" "$home.part/old"
ends 0 setup/libtorch.sh
[ -e "$home/complete" ] || fail "LibTorch is not complete"
[ ! -e "$home/old" ] || fail "the old folder is still there"
[ ! -e "$home.part" ] || fail "what was half done lies around"

echo "another version: beside the default, with the wheels that it asks for"
newest=$ECHELON_CACHE/libtorch-2.15.0
ends 0 setup/libtorch.sh --version 2.15.0
[ "$(cat "$temp/out")" = "$newest/torch" ] || fail "it prints $(cat "$temp/out")"
[ -e "$home/complete" ] || fail "the default is gone"
[ "$(sort "$FETCHED" | tr '\n' ' ')" = "cuda-toolkit==13.2.2 nvidia-cuda-cupti==13.2.86.* \
nvidia-cuda-runtime==13.2.86.* nvidia-nccl-cu13==2.30.7 torch==2.15.0 " ] ||
  fail "it fetched $(cat "$FETCHED")"
ends 0 setup/libtorch.sh --version 2.15.0
[ ! -s "$FETCHED" ] || fail "it fetched again"
ends 2 setup/libtorch.sh --version newest
says "such as --version 2.15.0"
ends 2 setup/libtorch.sh --version
says "such as --version 2.15.0"

echo "ECHELON_LIBTORCH without LibTorch"
ECHELON_LIBTORCH="$temp/nowhere" ends 1 setup/libtorch.sh
says "ECHELON_LIBTORCH=$temp/nowhere has no lib/libtorch_cpu.so"
ECHELON_LIBTORCH="$home/torch" ends 0 setup/libtorch.sh
ECHELON_LIBTORCH="$home/torch" ends 1 setup/libtorch.sh --version 2.15.0
says "is not the LibTorch 2.15.0 of --version"
version=torch/include/torch/headeronly/version.h
mkdir -p "$newest/${version%/*}"
printf '#define TORCH_VERSION_%s\n' "MAJOR 2" "MINOR 15" "PATCH 0" >"$newest/$version"
ECHELON_LIBTORCH="$newest/torch" ends 0 setup/libtorch.sh --version 2.15.0

echo "missing packages: root installs them, another user reads how"
USER_ID=1000 ends 1 setup/packages.sh
says "sudo apt-get install g++ cmake"
ends 1 setup/packages.sh
says "Unable to locate package"
says "apt-get could not install: g++ cmake"
echo "passed"
