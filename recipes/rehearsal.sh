#!/usr/bin/env bash
# Tests all steps of a real run on a CPU, with GSM8K, the tokenizer of Qwen2.5, and a model with the
# architecture of Qwen2.5-0.5B and random weights. Prepares the data, checks the config, plans the
# memory, and trains for two steps. The training is killed after the first step and resumed. Then
# evaluates, exports, and generates an answer in transformers and with bacr. The model learns nothing.
#
#   recipes/rehearsal.sh [--dry-run] [--out DIR] [--data PATH] [--tokenizer DIR]
#
#   --dry-run    print the commands that would run, and do nothing
#   --out        a new folder, runs/recipe-rehearsal by default; needs a few GB
#   --data       a folder or an archive with a copy of GSM8K; by default it is downloaded from the hub
#   --tokenizer  a folder with Qwen2.5's tokenizer, models/Qwen2.5-0.5B-Instruct by default
# Needs the extra hub to get the data, the extra parity (torch), and 16 GiB of memory. Takes at most 20
# minutes on two cores.

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/steps.sh"

out=runs/recipe-rehearsal data="" tokenizer=models/Qwen2.5-0.5B-Instruct
while [ $# -gt 0 ]; do
  case "$1" in
    --out) needs_value "$1" $#; out="$2"; shift 2 ;;
    --data) needs_value "$1" $#; data="$2"; shift 2 ;;
    --tokenizer) needs_value "$1" $#; tokenizer="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) die "command line: found '$1'; see --help" ;;
  esac
done
if [ "$dry_run" = 0 ]; then
  [ ! -e "$out" ] || die "--out $out: is there already; use a new folder"
  [ -d "$tokenizer" ] || die "--tokenizer $tokenizer: no such folder; run hf download \
Qwen/Qwen2.5-0.5B-Instruct --local-dir $tokenizer --exclude '*.safetensors', or write another"
fi
# The resumed run reuses the compiled programs in this cache. transformers copies the model code of
# the exported folder to a cache of modules.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$out/xla}"
export HF_MODULES_CACHE="${HF_MODULES_CACHE:-$out/modules}"
question="A baker fills 12 trays with 15 rolls each. How many rolls are that?"

# Runs training until the first checkpoint is complete, then kills it with SIGKILL, to simulate a
# machine that fails.
killed() {
  printf '%q ' "$@"
  echo "# killed after the first checkpoint"
  [ "$dry_run" = 0 ] || return 0
  "$@" &
  local run=$!
  until [ -d "$out/run/checkpoints/1" ]; do
    kill -0 "$run" 2>/dev/null || die "training ended before its first checkpoint"
    sleep 1
  done
  kill -KILL "$run"
  wait "$run" || true
  [ ! -e "$out/run/summary.json" ] || die "training ended before it was killed"
}

train=(--config "$here/rehearsal.yaml" "output.dir=$out/run" "model.path=$out/model")
train+=("data.dir=$out/data")
step "$python" "$here/random_weights.py" --tokenizer "$tokenizer" --out "$out/model"
step bacr data --prepare "$out/data" gsm8k ${data:+--from "$data"}
step bacr train --check "${train[@]}"
step bacr plan --compile none --devices 1 "${train[@]}"
killed "$python" -m bacr_jax.train "${train[@]}"
step bacr train --resume required "${train[@]}"
step bacr evaluate --run "$out/run" --budgets 4,16 --size 2 --out "$out/evaluation"
step bacr export --run "$out/run" --out "$out/hf" --dtype float32
step "$python" "$here/ask_transformers.py" --model "$out/hf" --budget 8 "$question"
step bacr generate --model "$out/hf" --budget 8 "$question"
