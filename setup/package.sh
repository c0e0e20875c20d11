#!/usr/bin/env bash
# Makes dist/echelon-VERSION-linux-x86_64.tar.gz from build/: programs, libraries,
# headers, the CMake package, completions and man pages. It runs on Debian 12 once
# its get-libtorch.sh has been run there.
set -euo pipefail
cd "$(dirname "$0")/.."
source setup/fetch.sh

version=$(sed -n 's/^project(Echelon VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
name=echelon-$version-linux-x86_64
need_packages "the man pages" help2man

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
root=$temp/$name
cmake --install build --prefix "$root" --strip >/dev/null
rm "$root/lib/echelon/libtorch"

mkdir -p "$root/lib/echelon/setup" "$root/share/man/man1" \
  "$root/share/bash-completion/completions" "$root/share/zsh/site-functions"
cp setup/libtorch.sh setup/fetch.sh "$root/lib/echelon/setup/"
cp setup/package/get-libtorch.sh README.md "$root/"
cp -r examples "$root/share/echelon-examples"
build/bin/echelon completion bash >"$root/share/bash-completion/completions/echelon"
build/bin/echelon completion zsh >"$root/share/zsh/site-functions/_echelon"

man() {
  help2man --no-info --version-string="$version" --no-discard-stderr \
    --name="$2" --output="$root/share/man/man1/$3.1" "$1"
}
man build/bin/echelon "train deep learning models on many devices" echelon
commands=$(build/bin/echelon --help | sed -n 's/^  \([a-z]\+\)  .*/\1/p')
for command in $commands; do
  printf '#!/bin/sh\nexec build/bin/echelon %s "$@"\n' "$command" >"$temp/$command"
  chmod +x "$temp/$command"
  about=$(build/bin/echelon --help | sed -n "s/^  $command  *//p" | head -1)
  man "$temp/$command" "${about:-echelon $command}" "echelon-$command"
done

mkdir -p dist
tar -C "$temp" --owner=0 --group=0 -czf "dist/$name.tar.gz" "$name"
echo "package: dist/$name.tar.gz ($(du -h "dist/$name.tar.gz" | cut -f1))"
