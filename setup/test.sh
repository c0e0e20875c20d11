#!/usr/bin/env bash
# Runs every test of build/, or of build-VERSION/. The last lines are CTest's own
# summary, and its counts in one line.
# usage: setup/test.sh [--libtorch VERSION] [ARGUMENT OF CTEST ...]
set -euo pipefail
cd "$(dirname "$0")/.."
build=build
if [ "${1:-}" = --libtorch ]; then
  build=build-${2:-}
  shift "$(($# < 2 ? $# : 2))"
fi
echo "test: running every test (labels: unit ranks procs browser pytorch slurm gpu check)"
result=$PWD/$build/tests.xml
rm -f "$result"
status=0
ctest --test-dir "$build" --output-on-failure --no-tests=error \
  --output-junit "$result" "$@" || status=$?
if [ -e "$result" ]; then
  count() { sed -n "s/^[[:space:]]*$1=\"\([0-9]*\)\".*/\1/p" "$result" | head -1; }
  tests=$(count tests) failed=$(count failures) skipped=$(count skipped)
  echo "tests: $((tests - failed - skipped)) passed, $failed failed, $skipped skipped"
fi
exit "$status"
