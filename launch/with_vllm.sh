#!/usr/bin/env bash
# Trains on one machine with vLLM (rollout.engine=vllm). The first GPUs are for the learner, and each
# of the other GPUs runs a vLLM server that samples. Not tested on GPUs yet.
#
#   launch/with_vllm.sh --learner N --samplers M [--gpu NAME] [--python PYTHON] [--host ADDRESS]
#       [--dry-run] --config F [key.sub=value ...]
#
#   --learner   number of GPUs for the learner, the first ones (of CUDA_VISIBLE_DEVICES, if it is set)
#   --samplers  number of GPUs for sampling
#   --gpu       settings of the learner, as in launch/one_box.sh
#   --python    interpreter of the environment with vLLM and the plugin, as in launch/sampler.sh
#   --host      address on which the servers listen, and which the learner uses; 127.0.0.1 by default.
#               Other addresses can be reached from other machines (launch/sampler.sh).
#   --dry-run   print the commands that would run, and do nothing
# All other arguments are passed to `bacr train`, such as rollout.async_steps=1. The servers load policies
# from memory (/dev/shm). They are stopped when training ends for any reason. Until then, their logs
# are in sampler-PORT.log in the folder of the policies.

set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/environment.sh"

learner="" samplers="" gpu=() python="${SERVING_PYTHON:-python}" host=127.0.0.1 dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --learner) needs_value "$1" $#; learner="$2"; shift 2 ;;
    --samplers) needs_value "$1" $#; samplers="$2"; shift 2 ;;
    --gpu) needs_value "$1" $#; gpu=(--gpu "$2"); shift 2 ;;
    --python) needs_value "$1" $#; python="$2"; shift 2 ;;
    --host) needs_value "$1" $#; host="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; pass --config configs/NAME.yaml"
for name in learner samplers; do
  case "${!name}" in
    "" | *[!0-9]* | 0*) die "--$name: found '${!name}'; use a number of GPUs, 1 or more" ;;
  esac
done

some_gpus 0 $((learner + samplers)) >/dev/null # all of them are there
weights="/dev/shm/bacr-$$" urls=""
for ((i = 0; i < samplers; i++)); do
  urls+="${urls:+, }http://$host:$((8000 + i))"
done
train=("$here/one_box.sh" ${gpu[@]+"${gpu[@]}"} --gpus "$learner" "${rest[@]}")
train+=(rollout.engine=vllm "rollout.urls=[$urls]" "rollout.weights_dir=$weights")
if [ "$dry_run" = 1 ]; then
  for ((i = 0; i < samplers; i++)); do
    printf 'CUDA_VISIBLE_DEVICES=%s ' "$(some_gpus $((learner + i)) 1)"
    printf '%q ' "$here/sampler.sh" --weights "$weights" --host "$host" --port $((8000 + i)) --python "$python"
    echo
  done
  exec "${train[@]}" --dry-run
fi

pids=() training=""
finish() {
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait || true
  rm -rf "$weights"
}
trap finish EXIT
# Forwards signals to training, which saves a checkpoint before it exits.
trap '[ -z "$training" ] || kill -TERM "$training"' TERM INT
trap '[ -z "$training" ] || kill -USR1 "$training"' USR1
mkdir -p "$weights"
for ((i = 0; i < samplers; i++)); do
  CUDA_VISIBLE_DEVICES="$(some_gpus $((learner + i)) 1)" "$here/sampler.sh" --weights "$weights" \
    --host "$host" --port $((8000 + i)) --python "$python" >"$weights/sampler-$((8000 + i)).log" 2>&1 &
  pids+=($!)
done
"${train[@]}" &
training=$!
code=0
wait "$training" || code=$?
# A signal interrupts `wait` while training is still running, so wait again until it has exited.
while kill -0 "$training" 2>/dev/null; do
  code=0
  wait "$training" || code=$?
done
exit "$code"
