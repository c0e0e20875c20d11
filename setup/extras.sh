#!/usr/bin/env bash
# What only some tests and the benchmarks against PyTorch need: a virtual
# environment with Python's PyTorch (2.6 GB, in the user's cache) and Chromium.
# Tests that miss them are skipped with that reason.
set -euo pipefail

cache=${ECHELON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/echelon}
venv=$cache/pytorch-2.11.0
mkdir -p "$cache"
exec 9>"$cache/extras.lock"
flock 9

if [ ! -e "$venv/complete" ]; then
  echo "set-up: fetching Python's PyTorch into $venv (2.6 GB, once)"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    torch==2.11.0 torchvision==0.26.0 numpy safetensors==0.8.0 pillow \
    playwright==1.65.2 jsonschema
  touch "$venv/complete"
fi

if ! command -v chromium >/dev/null; then
  if [ "$(id -u)" -eq 0 ]; then
    echo "set-up: installing Debian package: chromium"
    apt-get update >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      chromium fonts-dejavu-core >/dev/null
  else
    echo "set-up: Chromium is missing; install it with: sudo apt-get install chromium" >&2
    echo "set-up: the tests labelled 'browser' are skipped until then" >&2
  fi
fi
