#!/usr/bin/env bash
# Makes this folder ready to run: the Debian packages that the programs load, and
# LibTorch from its Python wheel, kept in the user's cache folder.
#
#   ECHELON_LIBTORCH   another copy of LibTorch 2.11.0 to use
#   ECHELON_CACHE      where to keep it (default: ~/.cache/echelon)
set -euo pipefail
cd "$(dirname "$0")"

packages=(libicu72 libsentencepiece0 libturbojpeg0 libpng16-16 libxxhash0 libssl3 libsqlite3-0 libcurl4 zlib1g libstdc++6
  libgomp1 ca-certificates python3 python3-venv python3-pip)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "these Debian packages are missing: ${missing[*]}" >&2
    echo "install them with: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

libtorch=$(lib/echelon/setup/libtorch.sh)
ln -sfn "$libtorch" lib/echelon/libtorch
echo "ready: bin/echelon doctor"
