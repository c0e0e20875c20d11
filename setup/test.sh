#!/usr/bin/env bash
# Runs every test of build/; the last lines are CTest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "test: running every test (labels: unit ranks procs browser pytorch gpu)"
exec ctest --test-dir build --output-on-failure --no-tests=error "$@"
