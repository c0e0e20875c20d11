#!/usr/bin/env bash
# The same model on the same digits, trained with four strategies; one page
# shows the picture of each. The result does not depend on the strategy.
set -euo pipefail
cd "$(dirname "$0")/.."
train() {
  local name=$1
  shift
  echo "demo: $name"
  build/bin/echelon train examples/configs/digits.toml --overwrite \
    --set "train.run=\"runs/demo/$name\"" "$@"
}
train data_parallel -n 2
train model_parallel --set 'model.devices=["cpu","cpu"]'
train pipeline_parallel --layout pp=2
train tensor_parallel --layout tp=2
build/bin/echelon compare --title "Handwritten digits, four ways" \
  --output runs/demo/report.html \
  runs/demo/data_parallel runs/demo/model_parallel runs/demo/pipeline_parallel \
  runs/demo/tensor_parallel
