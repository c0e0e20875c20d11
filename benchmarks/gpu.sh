#!/usr/bin/env bash
# The tests with label gpu, and what a first hour on GPUs should show, on a machine
# that need not be the one that builds.
#
#   benchmarks/gpu.sh pack            after `make build`: writes build/gpu.tar.xz
#   benchmarks/gpu.sh tests [REGEX]   where the GPU is: every test, or those that match
#   benchmarks/gpu.sh node [ARGS]     there: gpu_node.py, in 30 minutes: layouts,
#                                     stops, rates; writes gpu-node/index.html;
#                                     --small --ranks 4 needs one GPU alone
#   benchmarks/gpu.sh models [ARGS]   there: gpu_models.py, beside PyTorch
#
# There it needs this checkout with build/gpu.tar.xz, x86-64 Linux and a python3
# that has PyTorch 2.11 with CUDA; `models` asks for safetensors and transformers as
# well. (With a build of its own a machine runs `ctest --test-dir build -L gpu`.)
set -euo pipefail
cd "$(dirname "$0")/.."
archive=build/gpu.tar.xz
say() { echo "gpu: $*" >&2; }

# Libraries of Debian that a program links; those of C and C++ are everywhere.
libraries_of() {
  ldd "$@" | awk '$3 ~ "^(/usr)?/lib/" {print $3}' | sort -u |
    grep -Ev '/(libc|libm|libdl|librt|libutil|libpthread|libgcc_s|libstdc\+\+)\.so'
}

pack() {
  local folder=build/gpu
  rm -rf "$folder" "$archive"
  mkdir -p "$folder/bin" "$folder/lib" "$folder/benchmarks"
  # A line a test: its name, its seconds, its program and arguments.
  ctest --test-dir build -L gpu --show-only=json-v1 | python3 -c '
import json, os, sys
for test in json.load(sys.stdin)["tests"]:
    if "command" not in test:
        sys.exit("gpu: %s is not built: run \"make build\" first" % test["name"])
    properties = {p["name"]: p["value"] for p in test["properties"]}
    program, *arguments = test["command"]
    print(test["name"], int(properties["TIMEOUT"]), os.path.basename(program),
          *arguments)' >"$folder/tests"
  local program
  for program in $(cut -d ' ' -f 3 "$folder/tests" | sort -u) launch_run; do
    cp "build/tests/$program" "$folder/bin/"
  done
  cp build/bin/echelon build/bin/echelon-train "$folder/bin/"
  cp build/lib/libechelon_nccl.so "$folder/lib/"
  cp build/benchmarks/gpu_model_step "$folder/benchmarks/"
  libraries_of "$folder"/bin/* "$folder"/benchmarks/* |
    xargs -I{} cp -L {} "$folder/lib/"
  strip --strip-unneeded "$folder"/bin/* "$folder"/benchmarks/* \
    "$folder/lib/libechelon_nccl.so"
  # The programs share most of their code: a window that reaches over all of them.
  tar -C build -c gpu |
    xz --lzma2=preset=6,dict=256MiB >"$archive"
  rm -rf "$folder"
  say "$archive: $(du -h "$archive" | cut -f 1)"
}

# Unpacks the archive; afterwards $folder has it and programs find their libraries.
unpack() {
  if [ ! -e "$archive" ]; then
    say "$archive is missing: run \"benchmarks/gpu.sh pack\" where it was built"
    exit 1
  fi
  local torch
  torch=$(python3 -c '
import os, torch
assert torch.__version__.startswith("2.11."), torch.__version__
print(os.path.dirname(torch.__file__))') || {
    say "python3 needs PyTorch 2.11 with CUDA"
    exit 1
  }
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  python3 -W ignore -m tarfile -e "$archive" "$scratch"
  folder=$scratch/gpu
  LD_LIBRARY_PATH=$folder/lib:$torch/lib
  local nvidia
  for nvidia in "$torch"/../nvidia/*/lib; do
    LD_LIBRARY_PATH+=:$nvidia
  done
  export LD_LIBRARY_PATH
}

tests() {
  unpack
  export ECHELON_TEST_GPU=1
  local passed=0 failed=0 skipped=0 name seconds program arguments status
  while read -r -u 3 name seconds program arguments; do
    [[ $name =~ ${1:-.} ]] || continue
    status=0
    # shellcheck disable=SC2086  # arguments are words, and no patterns of files
    (cd "$folder" && set -f && timeout "$seconds" "bin/$program" $arguments) \
      >"$scratch/log" 2>&1 || status=$?
    case $status in
      0) echo "passed   $name"; passed=$((passed + 1)) ;;
      77) echo "skipped  $name: $(tail -n 1 "$scratch/log")"
        skipped=$((skipped + 1)) ;;
      *) grep -v '^\[ *\(OK\|RUN\|-*\) *\]' "$scratch/log" | tail -n 60
        echo "FAILED   $name ($status)"; failed=$((failed + 1)) ;;
    esac
    # Tests that measure say so.
    grep '^measured: ' "$scratch/log" || true
  done 3<"$folder/tests"
  echo "gpu tests: $passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
}

models() {
  unpack
  python3 benchmarks/versus_pytorch/gpu_models.py --build "$folder" "$@"
}

node() {
  unpack
  python3 benchmarks/gpu_node.py --build "$folder" "$@"
}

case ${1:-} in
  pack | tests | node | models) "$@" ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
