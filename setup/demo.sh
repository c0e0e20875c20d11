#!/usr/bin/env bash
# Trains a small GPT on this repository's pages, then a classifier of digits, each
# on one device and with five kinds of parallelism. One page a model compares the
# runs: the result does not depend on the strategy. `verify` proves it in float64,
# and `plan` says what eight GPUs would do.
# usage: setup/demo.sh [STEPS]   of each run; tests take few
set -euo pipefail
cd "$(dirname "$0")/.."
out=runs/demo
mkdir -p "$out"
# Its figures are those of CPUs, on a machine with GPUs as well.
export CUDA_VISIBLE_DEVICES=

train() {
  local model=$1 name=$2
  shift 2
  local run=$out/$model/$name log=$out/$model-$name.log
  if ! build/bin/echelon train "examples/configs/$model.toml" --overwrite \
    --set "train.run=\"$run\"" "$@" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
  fi
}

six_ways() {
  local model=$1 title=$2
  shift 2
  echo "demo: $title on one device, then with data, sharded, tensor, pipeline and model parallelism"
  train "$model" one_device -n 1 "$@"
  train "$model" data_parallel --layout dp=2 "$@"
  train "$model" sharded --layout fsdp=2 "$@"
  train "$model" tensor_parallel --layout tp=2 "$@"
  train "$model" pipeline_parallel --layout pp=2 "$@"
  train "$model" model_parallel --set 'model.devices=["cpu","cpu"]' "$@"
}

text=(--set train.steps="${1:-80}" --set train.batch=8 --set optimizer.warmup_steps=10
  --set 'data.sources=["doc/*.md"]')
six_ways text "a small GPT" "${text[@]}"
digits=()
[ $# -eq 0 ] || digits=(--set "train.steps=$1" --set optimizer.warmup_steps=1)
six_ways digits "a classifier of handwritten digits" "${digits[@]}"

echo "demo: verify proves in float64 that layouts compute what one device does"
proofs=()
for layout in dp=2 fsdp=2 tp=2 pp=2; do
  build/bin/echelon verify examples/configs/text.toml --layout $layout \
    --steps 2 --json "${text[@]}" >"$out/verify-$layout.json"
  proofs+=(--verified "$out/verify-$layout.json")
done

echo "demo: plan says what eight H100s would do with this model and with Llama 3 8B"
rm -rf "$out/gpt"
build/bin/echelon export "$out/text/one_device" "$out/gpt" --format huggingface >"$out/export.log"
plans=()
for model in "$out/gpt" llama3-8b; do
  name=$out/plan-$(basename "$model")
  build/bin/echelon plan --model "$model" --cluster h100-sxm:8 --batch 64 \
    --html "$name.html" --json >"$name.json"
  plans+=(--planned "$name.json")
done

runs=(one_device data_parallel sharded tensor_parallel pipeline_parallel model_parallel)
build/bin/echelon compare --title "Handwritten digits, six ways" \
  -o "$out/digits.html" "${runs[@]/#/$out/digits/}" >/dev/null
build/bin/echelon compare --title "A small GPT, six ways" -o "$out/report.html" \
  "${runs[@]/#/$out/text/}" "${proofs[@]}" "${plans[@]}" >/dev/null
echo "demo: digits: xdg-open $out/digits.html"
echo "demo: look at the page: xdg-open $out/report.html"
