#!/usr/bin/env bash
# Compares bacr-bounded with published GRPO on a task in which short thinking is less accurate. Both
# start from the same warm-up. Produces two evaluation tables and a page that compares the runs. Needs
# no download and no GPU.
#
#   recipes/tradeoff.sh [--dry-run] [--out DIR] [key.sub=value ...]
#
#   --dry-run  print the commands that would run, and do nothing
#   --out      a new folder, runs/recipe-tradeoff by default
# All other arguments are overrides of both training configs. An interrupted recipe continues where it
# stopped.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

out=runs/recipe-tradeoff
read_options "$@"

shared=("warmup.dir=$out/warmup" ${keys[@]+"${keys[@]}"})
bacr=(--config tradeoff "output.dir=$out/bacr" "${shared[@]}")
grpo=(--config tradeoff --config grpo "output.dir=$out/grpo" "${shared[@]}")
step bacr train --check "${bacr[@]}"
step bacr train --check "${grpo[@]}"
step bacr train "${bacr[@]}"
step bacr train "${grpo[@]}"
step bacr evaluate --run "$out/bacr" --size 500
step bacr evaluate --run "$out/grpo" --size 500 --compare "$out/bacr"
step bacr report --run "$out/bacr" --run "$out/grpo" --out "$out/compared.html"
[ -e "$out/hf" ] || step bacr export --run "$out/bacr" --out "$out/hf"
