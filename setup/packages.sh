#!/usr/bin/env bash
# Debian packages that the build needs. As root they are installed; as another
# user a missing one ends the set-up with the command that installs it.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache make git ca-certificates
  python3 python3-venv python3-pip unzip
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev
  libturbojpeg0-dev libjpeg62-turbo-dev libpng-dev zlib1g-dev
  libicu-dev libsentencepiece-dev libfmt-dev
  libgtest-dev libgmock-dev iproute2 strace
)

if ! command -v dpkg-query >/dev/null; then
  echo "set-up: this is not a Debian system: dpkg-query is missing" >&2
  echo "set-up: install what corresponds to: ${packages[*]}" >&2
  echo "set-up: then build with: setup/build.sh" >&2
  exit 1
fi

# One question for all: a second run costs nothing.
installed=$(dpkg-query -W -f='${Status} ${Package}\n' "${packages[@]}" 2>/dev/null |
  sed -n 's/^install ok installed //p' || true)
missing=()
for package in "${packages[@]}"; do
  if ! grep -qxF "$package" <<<"$installed"; then
    missing+=("$package")
  fi
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "set-up: these Debian packages are missing: ${missing[*]}" >&2
  echo "set-up: install them with: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "set-up: installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "set-up: apt-get could not install: ${missing[*]} (its last lines are above)" >&2
  exit 1
fi
