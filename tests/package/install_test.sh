#!/usr/bin/env bash
# Installs into a temporary folder, moves that folder, and builds and runs
# programs against it as a user would.
# usage: install_test.sh SOURCE_DIR BUILD_DIR LIBTORCH
set -euo pipefail
source_dir=$1 build_dir=$2 libtorch=$3

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

cmake --install "$build_dir" --prefix "$temp/first" >"$temp/install.log" ||
  { cat "$temp/install.log"; fail "cmake --install"; }
mv "$temp/first" "$temp/moved"
package=$temp/moved

# No path of this machine, but for the link to LibTorch.
if grep -rn --include='*.cmake' -e "$temp" -e "$source_dir" -e "$build_dir" \
  -e "$libtorch" "$package/lib" --exclude-dir=libtorch; then
  fail "the package names a folder of the machine that built it"
fi

for file in man/man1/echelon.1 man/man1/echelon-train.1 \
  bash-completion/completions/echelon zsh/site-functions/_echelon \
  fish/vendor_completions.d/echelon.fish; do
  [ -s "$package/share/$file" ] || fail "share/$file is not installed"
done

# Every header that an installed header asks for is installed.
missing=0
while read -r header; do
  if [ ! -e "$package/include/$header" ]; then
    grep -rln "\"$header\"" "$package/include" | sed "s|\$| includes $header, which is not installed|"
    missing=1
  fi
done < <(grep -rhoP '^#include "\Kechelon/[^"]+' "$package/include" | sort -u)
[ "$missing" -eq 0 ] || fail "headers are missing from HEADERS of their rooms"

echo "plain wing: no LibTorch"
mkdir "$temp/plain"
cat >"$temp/plain/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(Plain LANGUAGES CXX)
find_package(Echelon REQUIRED COMPONENTS plain)
if(TARGET Echelon::libtorch)
  message(FATAL_ERROR "the plain component brought LibTorch")
endif()
add_executable(plain main.cpp)
target_link_libraries(plain PRIVATE Echelon::layout)
END
cat >"$temp/plain/main.cpp" <<'END'
#include "echelon/layout/layout.h"
int main() { return echelon::Layout{}.dp_replicate == 1 ? 0 : 1; }
END
cmake -S "$temp/plain" -B "$temp/plain/build" -DCMAKE_PREFIX_PATH="$package" >"$temp/log" 2>&1 &&
  cmake --build "$temp/plain/build" >"$temp/log" 2>&1 ||
  { cat "$temp/log"; fail "a project with COMPONENTS plain"; }
"$temp/plain/build/plain" || fail "the plain program ends with $?"

echo "a LibTorch that is not there is an error with a way out"
if ECHELON_LIBTORCH=/nowhere cmake -S "$source_dir/examples/cmake_project" \
  -B "$temp/none" -DCMAKE_PREFIX_PATH="$package" >"$temp/log" 2>&1; then
  fail "configuring without LibTorch succeeded"
fi
grep -q "Set ECHELON_LIBTORCH" <(tr '\n' ' ' <"$temp/log") ||
  { cat "$temp/log"; fail "no way out named"; }

echo "examples/cmake_project"
cmake -S "$source_dir/examples/cmake_project" -B "$temp/example" \
  -DCMAKE_PREFIX_PATH="$package" -DECHELON_LIBTORCH="$libtorch" >"$temp/log" 2>&1 &&
  cmake --build "$temp/example" >"$temp/log" 2>&1 ||
  { cat "$temp/log"; fail "examples/cmake_project"; }

# The loss falls, gradients are the same on every rank, and on any number.
check() {
  local ranks=$1 first last
  first=$(sed -n 's/^.*step   1  loss //p' "$temp/out")
  last=$(sed -n 's/^.*step 200  loss //p' "$temp/out")
  awk -v first="$first" -v last="$last" \
    'BEGIN { exit !(first > 0.5 && last > 0 && last < first / 4) }' ||
    fail "$ranks ranks: the loss goes from '$first' to '$last'"
  [ "$(grep -c "of $ranks: gradient norm" "$temp/out")" -eq "$ranks" ] ||
    fail "$ranks ranks: not every rank ended"
  [ "$(sed -n 's/^.*gradient norm //p' "$temp/out" | sort -u | wc -l)" -eq 1 ] ||
    fail "$ranks ranks: their gradients differ"
  sed -n 's/^.*\(step .*\|gradient norm .*\)$/\1/p' "$temp/out" | sort -u
}
"$temp/example/program" | tee "$temp/out"
check 1 >"$temp/alone"
if [ -x "$package/bin/echelon" ]; then
  "$package/bin/echelon" run -n 3 -- "$temp/example/program" | tee "$temp/out"
  check 3 | diff "$temp/alone" - || fail "3 ranks differ from one"
fi
if [ -x "$package/bin/echelon" ] && [ -x "$package/bin/echelon-train" ]; then
  echo "echelon new: made, built, trained and verified"
  export PATH=$package/bin:$PATH ECHELON_LIBTORCH=$libtorch
  cd "$temp"
  echelon new mine >"$temp/log"
  if echelon new mine >"$temp/log" 2>&1; then
    fail "echelon new wrote into a folder that exists"
  fi
  if echelon new 'my project' >"$temp/log" 2>&1; then
    fail "echelon new took a name that CMake does not take"
  fi
  cd mine
  # CMake finds the package by PATH.
  cmake -B build >"$temp/log" 2>&1 && cmake --build build >>"$temp/log" 2>&1 ||
    { cat "$temp/log"; fail "the project of echelon new does not build"; }
  echelon train train.toml -n 2 >"$temp/log" 2>&1 ||
    { cat "$temp/log"; fail "the project of echelon new does not train"; }
  # The held-out error of the last evaluation is a tenth of the surface's height.
  error=$(sed -n 's/.*"absolute_error":\([0-9.e-]*\).*/\1/p' runs/first/metrics.jsonl | tail -1)
  awk -v error="$error" 'BEGIN { exit !(error > 0 && error < 0.1) }' ||
    fail "the project's model has a held-out error of '$error'"
  ctest --test-dir build >"$temp/log" 2>&1 ||
    { cat "$temp/log"; fail "the tests of the project of echelon new"; }
  cd "$temp"
fi
if [ -x "$package/bin/echelon-train" ]; then
  "$package/bin/echelon-train" --help >"$temp/log" 2>&1 ||
    { cat "$temp/log"; fail "the installed echelon-train does not start"; }
fi
echo "passed"
