#!/usr/bin/env bash
# What only some tests and the benchmarks against PyTorch need: a virtual
# environment with Python's PyTorch, moto, an S3 server, Arrow, and what reads a
# run's figures (3 GB, in the user's cache), Chromium, Open MPI's mpirun, Slurm,
# Prometheus (in the user's cache too), and the tools that `make check` runs.
# Tests that miss them are skipped with that reason.
set -euo pipefail
source "$(dirname "$0")/fetch.sh"

venv=$cache/pytorch-2.11.0
python_packages=(
  torch==2.11.0 torchvision==0.26.0 numpy safetensors==0.8.0 pillow
  playwright==1.65.2 jsonschema transformers==5.23.0
  tokenizers==0.23.3 sentencepiece==0.2.3 kubernetes-validate==1.37.0
  "moto[server,s3]==5.2.5" tensorboard==2.21.0 opentelemetry-proto==1.45.2
  wandb==0.31.0 mlflow-skinny==3.17.2 pyarrow==26.0.1
)

# An environment of an older list gets what is new in this one.
is_complete() {
  [ "$(cat "$venv/complete" 2>/dev/null)" = "${python_packages[*]}" ]
}
if ! is_complete; then
  make_cache
  take_turns extras
fi
if ! is_complete; then
  if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    need_space "$cache" 9000 "Python's PyTorch"
    say "fetching Python's PyTorch into $venv (3 GB, once)"
  else
    say "fetching what is new in $venv"
  fi
  trap 'say "interrupted; run the same command again to resume"; exit 130' INT TERM
  mkdir -p "$cache/wheels"
  [ -e "$venv" ] || python3 -m venv "$venv"
  pip "$venv/bin/python" install --cache-dir "$cache/wheels" \
    "${python_packages[@]}"
  rm -rf "$cache/wheels"
  echo "${python_packages[*]}" >"$venv/complete"
fi

# Installed, the package would start a service that listens on every address. Its
# programs need no more than themselves.
if ! command -v prometheus >/dev/null && [ ! -e "$cache/prometheus/usr/bin/prometheus" ]; then
  make_cache
  say "fetching Debian's prometheus into $cache/prometheus (20 MB, once)"
  temp=$(mktemp -d)
  if (cd "$temp" && apt-get download prometheus) >"$temp/log" 2>&1 &&
    dpkg-deb --extract "$temp"/prometheus_*.deb "$temp/programs"; then
    mv "$temp/programs" "$cache/prometheus"
  else
    tail -n 3 "$temp/log" >&2
    say "no prometheus: its test is skipped until then; does \`apt-get update\` work?"
  fi
  rm -rf "$temp"
fi

need_packages "the tests of pages, of mpirun, of Slurm and of the tree" \
  chromium fonts-dejavu-core openmpi-bin slurm-wlm munge slurmdbd mariadb-server-core \
  clang-format clang-16 clang-tidy-16 codespell ||
  say "those tests are skipped until then"
