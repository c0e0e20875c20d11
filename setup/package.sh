#!/usr/bin/env bash
# Makes dist/echelon-VERSION-linux-x86_64.tar.gz from build/: programs, libraries,
# headers, the CMake package, completions and man pages. It runs on Debian 12 once
# its get-libtorch.sh has been run there.
set -euo pipefail
cd "$(dirname "$0")/.."
source setup/fetch.sh

version=$(sed -n 's/^project(Echelon VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
name=echelon-$version-linux-x86_64

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
root=$temp/$name
cmake --install build --prefix "$root" --strip >/dev/null
rm "$root/lib/echelon/libtorch"

mkdir -p "$root/lib/echelon/setup"
cp setup/libtorch.sh setup/fetch.sh "$root/lib/echelon/setup/"
cp setup/package/get-libtorch.sh README.md "$root/"
cp -r examples "$root/share/echelon-examples"

mkdir -p dist
tar -C "$temp" --owner=0 --group=0 -czf "dist/$name.tar.gz" "$name"
echo "package: dist/$name.tar.gz ($(du -h "dist/$name.tar.gz" | cut -f1))"
