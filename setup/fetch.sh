# For the other scripts here: where things are kept, and how they are fetched.
# Needs bash with set -euo pipefail.

cache=${ECHELON_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/echelon}

say() { echo "set-up: $*" >&2; }

# need_space FOLDER MEGABYTES WHAT: ends when the disk has less room than that.
need_space() {
  local free
  free=$(($(df --output=avail -k "$1" | tail -n 1) / 1024))
  if [ "$free" -lt "$2" ]; then
    say "$3 needs $2 MB in $1, which has $free MB free"
    say "free some space, or set ECHELON_CACHE to a folder on a larger disk"
    exit 1
  fi
}

# make_cache: the folder, or the reason why there is none.
make_cache() {
  if ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ]; then
    say "cannot write to $cache, where downloads are kept"
    say "set ECHELON_CACHE to a folder that you may write to"
    exit 1
  fi
}

# take_turns NAME: one set-up at a time; others wait.
take_turns() {
  exec 9>"$cache/$1.lock"
  if ! flock -n 9; then
    say "waiting for another set-up to fetch the same"
    flock 9
  fi
}

# pip PYTHON VERB ARGUMENTS…: quietly; on failure says why, and what to do.
pip() {
  local python=$1 verb=$2 log
  shift 2
  log=$(mktemp)
  if ! "$python" -m pip "$verb" --quiet --disable-pip-version-check \
    --no-input --retries 3 --timeout 30 "$@" >"$log" 2>&1; then
    grep -v '^WARNING: Retrying' "$log" | tail -n 5 >&2
    rm -f "$log"
    say "pip could not fetch the above; what is there already was kept"
    say "run the same command again when the network is back, or set"
    say "ECHELON_LIBTORCH to the torch/ folder of a PyTorch ${version:-2.11.0} that you have"
    return 1
  fi
  rm -f "$log"
}

# need_packages WHAT PACKAGE…: installs Debian packages that are missing, as root; as
# another user says how, and returns 1.
need_packages() {
  local what=$1 package missing=() log
  shift
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null |
      grep -q '^install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    say "$what needs Debian packages that are missing; install them with:"
    say "  sudo apt-get install ${missing[*]}"
    return 1
  fi
  say "installing Debian packages: ${missing[*]}"
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y \
    --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    say "apt-get could not install: ${missing[*]} (its last lines are above)"
    exit 1
  fi
  rm -f "$log"
}
