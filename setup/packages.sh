#!/usr/bin/env bash
# Debian packages that the build needs. As root they are installed; as another
# user a missing one ends the set-up with the command that installs it.
set -euo pipefail
source "$(dirname "$0")/fetch.sh"

packages=(
  g++ cmake ninja-build ccache make git ca-certificates
  python3 python3-venv python3-pip unzip
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev
  libturbojpeg0-dev libjpeg62-turbo-dev libpng-dev zlib1g-dev
  libicu-dev libsentencepiece-dev libfmt-dev libssl-dev libsqlite3-dev
  libcurl4-openssl-dev
  libgtest-dev libgmock-dev iproute2 strace
)

if ! command -v dpkg-query >/dev/null; then
  say "this is not a Debian system: dpkg-query is missing"
  say "install what corresponds to: ${packages[*]}"
  say "then build with: setup/build.sh"
  exit 1
fi
need_packages "the build" "${packages[@]}"
