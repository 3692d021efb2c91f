#!/usr/bin/env bash
# Measures decoding and training on one NVIDIA GPU, one record per measurement.
#
#   benchmarks/gpu.sh [--dry-run] [--out DIR]
#
#   --dry-run  print the commands that would run, and do nothing
#   --out      output folder, runs/gpu by default; measurements whose record exists are skipped
# Some 25 minutes, mostly for compiling; not yet run on a GPU. A measurement that takes more than
# three minutes or fails is reported and left out. The records DIR/NAME.json can be copied to
# benchmarks/baselines/NAME-CARD.json. DIR/log.txt has the complete output, with the kernels of a
# step. The measurements are, in this order:
#
#   decoding-rows-N      decoding by number of rows
#   decoding-chunk-64    longer calls: does the host's time between calls matter?
#   decoding-xla         attention by XLA in place of cuDNN
#   decoding-flags-N     one XLA flag each, for launches of kernels (command buffers are CUDA graphs)
#   decoding-shape-1.5b  decoding of a Qwen2.5-1.5B
#   attention-*          attention of one layer, with full and with half caches
#   learner              the update of a 1.5B model

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/../recipes/steps.sh"

out=runs/gpu
read_options "$@"
[ ${#keys[@]} = 0 ] || die "command line: found '${keys[0]}'; see --help"
[ "$dry_run" = 1 ] || mkdir -p "$out"

# Runs a benchmark script, and writes its record. The first argument names the record, the second
# one holds flags of XLA.
measure() {
  local name="$1" flags="$2"
  shift 2
  [ ! -e "$out/$name.json" ] || return 0
  local command=(timeout 180 env "XLA_FLAGS=${XLA_FLAGS-} $flags" "$python" "$here/$1" "${@:2}")
  if [ "$dry_run" = 1 ]; then
    step "${command[@]}" --record "$out/$name.json"
    return 0
  fi
  echo "== $name" | tee -a "$out/log.txt"
  "${command[@]}" --record "$out/$name.json" 2>&1 | tee -a "$out/log.txt" | tail -n 1 ||
    echo "$name: failed, see $out/log.txt"
}

if [ "$dry_run" = 0 ]; then
  nvidia-smi -L || die "no NVIDIA GPU: nvidia-smi -L failed; run this script on a machine with one"
fi
for rows in 256 512 1024 2048; do
  measure "decoding-rows-$rows" "" decoding.py --rows "$rows" --kernels
done
measure decoding-chunk-64 "" decoding.py --chunk 64
measure decoding-xla "" decoding.py --attention xla
number=0
for flag in \
  --xla_gpu_enable_command_buffer= \
  --xla_gpu_enable_command_buffer=+WHILE \
  --xla_gpu_graph_min_graph_size=1 \
  --xla_gpu_enable_triton_gemm=false \
  --xla_gpu_exhaustive_tiling_search=true; do
  number=$((number + 1))
  measure "decoding-flags-$number" "$flag" decoding.py
done
measure decoding-shape-1.5b "" \
  decoding.py --preset qwen2.5-1.5b --rows 192 --prompt 1920 --kernels
measure attention-smollm2 "" decode_attention.py
measure attention-1.5b "" \
  decode_attention.py --rows 192 --keys 2048 --kv-heads 2 --group 6 --head-dim 128
measure learner "" learner.py --rounds 9
