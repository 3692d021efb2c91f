#!/usr/bin/env bash
# Trains a Qwen2.5 with half a billion parameters on GSM8K under token budgets, on two CPU cores or on one GPU.
# Evaluates the original model, warms it up, and trains it with bacr-bounded. Then measures whether the trained model
# uses its budget, and how much it saves compared with truncating the original model. Exports the trained model, and
# generates answers in plain transformers. This recipe has not been run yet (docs/recipes.md).
#
#   recipes/qwen2.5-0.5b-gsm8k.sh [--dry-run] [--model FOLDER-OR-NAME] [--gpu] [--out DIR] [key.sub=value ...]
#
#   --dry-run  print the commands that would run, and do nothing
#   --model    a Hugging Face folder, or the name of a model on the hub; Qwen/Qwen2.5-0.5B-Instruct by default
#   --gpu      use 16-bit weights and products, for one GPU with 24 GB; the default is for two CPU cores with 24 GB
#   --out      a new folder, runs/recipe-qwen2.5-0.5b-gsm8k by default; needs 30 GB
# All other arguments are overrides of the training config, such as data.dir=DIR. An interrupted recipe continues where
# it stopped. Needs the extra hub to get the data and the model, and the extra parity (torch) for answers in
# transformers.

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/steps.sh"

out=runs/recipe-qwen2.5-0.5b-gsm8k model=Qwen/Qwen2.5-0.5B-Instruct gpu=0 words=()
while [ $# -gt 0 ]; do
  case "$1" in
    --model) needs_value "$1" $#; model="$2"; shift 2 ;;
    --gpu) gpu=1; shift ;;
    *) words+=("$1"); shift ;;
  esac
done
read_options ${words[@]+"${words[@]}"}
# With pages of 2 MiB, updates of a model of this size take at most three quarters of the time.
export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
question="Tom has 12 apples. He gives 5 to Ann and buys 9 more. How many apples does he have?"

arithmetic=(model.compute_dtype=float32 model.product_dtype=bfloat16)
learner=()
if [ "$gpu" = 1 ]; then
  arithmetic=(model.compute_dtype=bfloat16 model.product_dtype=null)
  learner=(train.padding_free=false train.micro_batch_tokens=null train.micro_batch_rows=16)
fi
# A model on the hub is downloaded once, to the hub's cache.
download=()
[ -d "$model" ] || download=(--download)
data=data
for key in ${keys[@]+"${keys[@]}"}; do
  case "$key" in data.dir=*) data="${key#data.dir=}" ;; esac
done
prompts=(data.prompt_format=think_answer "data.system_prompt=Think, then answer." data.max_prompt_tokens=192
  rollout.answer_tokens=16 "data.dir=$data")
train=(--config qwen2.5-0.5b-gsm8k "output.dir=$out/run" "model.path=$model" "${arithmetic[@]}"
  ${learner[@]+"${learner[@]}"} ${keys[@]+"${keys[@]}"})

[ -e "$data/gsm8k/train.jsonl" ] || step bacr data --prepare "$data"
step bacr train --check "${train[@]}" ${download[@]+"${download[@]}"}
# Evaluates the original model with truncation at every 32 tokens. This is the accuracy at smaller budgets without
# training.
step bacr evaluate --model "$model" ${download[@]+"${download[@]}"} --data gsm8k:gsm8k/test.jsonl --budgets 320 \
  --every 32 --size 500 --seed 0 --name "as it is" --out "$out/before" "${prompts[@]}" "${arithmetic[@]}"
step bacr train "${train[@]}" ${download[@]+"${download[@]}"}
step bacr evaluate --run "$out/run" --size 500 --seed 0 --swap --free "$out/before" --out "$out/after"
step bacr report --run "$out/run"
[ -e "$out/hf" ] || step bacr export --run "$out/run" --out "$out/hf" --dtype float32
for budget in 64 320; do
  step "$python" "$here/ask_transformers.py" --model "$out/hf" --budget "$budget" "$question"
done
step bacr generate --model "$out/hf" --budget 64,320 "$question"
