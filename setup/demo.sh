#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
build/bin/echelon train examples/configs/digits.toml -n 2 --overwrite
