#!/usr/bin/env bash
# Trains the quickstart with bacr-bounded, prints the evaluation table, and exports the model. Needs
# no download and no GPU.
#
#   recipes/quickstart.sh [--dry-run] [--out DIR] [key.sub=value ...]
#
#   --dry-run  print the commands that would run, and do nothing
#   --out      a new folder, runs/recipe-quickstart by default
# All other arguments are overrides of the training config. An interrupted recipe continues where it
# stopped.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

out=runs/recipe-quickstart
read_options "$@"

train=(--config quickstart "output.dir=$out/run" ${keys[@]+"${keys[@]}"})
step bacr train --check "${train[@]}"
step bacr plan --compile none --devices 1 "${train[@]}"
step bacr train "${train[@]}"
step bacr evaluate --run "$out/run" --size 500
step bacr report --run "$out/run"
[ -e "$out/hf" ] || step bacr export --run "$out/run" --out "$out/hf"
step bacr generate --model "$out/hf" --budget 8,64 4a2b3c1
