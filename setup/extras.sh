#!/usr/bin/env bash
# What only some tests and the benchmarks against PyTorch need: a virtual
# environment with Python's PyTorch (2.6 GB, in the user's cache), Chromium, and
# Open MPI's mpirun.
# Tests that miss them are skipped with that reason.
set -euo pipefail
source "$(dirname "$0")/fetch.sh"

venv=$cache/pytorch-2.11.0
python_packages=(
  torch==2.11.0 torchvision==0.26.0 numpy safetensors==0.8.0 pillow
  playwright==1.65.2 jsonschema transformers==5.23.0
  tokenizers==0.23.3 sentencepiece==0.2.3
)

# An environment of an older list gets what is new in this one.
is_complete() {
  [ "$(cat "$venv/complete" 2>/dev/null)" = "${python_packages[*]}" ]
}
if ! is_complete; then
  make_cache
  take_turns extras
fi
if ! is_complete; then
  if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    need_space "$cache" 9000 "Python's PyTorch"
    say "fetching Python's PyTorch into $venv (2.6 GB, once)"
  else
    say "fetching what is new in $venv"
  fi
  trap 'say "interrupted; run the same command again to go on"; exit 130' INT TERM
  mkdir -p "$cache/wheels"
  [ -e "$venv" ] || python3 -m venv "$venv"
  pip "$venv/bin/python" install --cache-dir "$cache/wheels" \
    "${python_packages[@]}"
  rm -rf "$cache/wheels"
  echo "${python_packages[*]}" >"$venv/complete"
fi

packages=()
command -v chromium >/dev/null || packages+=(chromium fonts-dejavu-core)
command -v mpirun >/dev/null || packages+=(openmpi-bin)
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" -eq 0 ]; then
    say "installing Debian packages: ${packages[*]}"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get update && apt-get install -y --no-install-recommends \
      "${packages[@]}"; } >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      say "apt-get could not install: ${packages[*]} (its last lines are above)"
      exit 1
    fi
  else
    say "Debian packages are missing; install them with:"
    say "  sudo apt-get install ${packages[*]}"
    say "the tests that need Chromium or mpirun are skipped until then"
  fi
fi
