#!/usr/bin/env bash
# Runs a vLLM server that samples for a training run (rollout.engine=vllm). Waits for the first policy
# of the run, then serves the newest one. The run sends all later policies to the server itself. If
# the server exits, it is restarted. Not tested on GPUs yet.
#
#   launch/sampler.sh --weights DIR [--port P] [--gpus N] [--python PYTHON] [--dry-run] [--option ...]
#
#   --weights  rollout.weights_dir of the run, or the folder of the run in it
#   --port     port of the server, 8000 by default
#   --gpus     run N servers, one on each of the first N GPUs (of CUDA_VISIBLE_DEVICES, if it is set),
#              on the ports P to P + N - 1; by default one server
#   --python   interpreter of the environment with vLLM and the plugin (integrations/vllm); by default
#              SERVING_PYTHON, or python
#   --dry-run  print the command that would run on the newest policy (with --gpus, the command of each
#              server), and do nothing
# All other arguments are passed to vLLM, such as --dtype float32 or --tensor-parallel-size 2. The server
# listens on 127.0.0.1. If the learner runs on another machine, pass --host 0.0.0.0. Anyone who can
# connect to the port can then replace the policy: VLLM_API_KEY protects the routes that sample, but not
# the routes that load weights. Only a private network or a firewall protects those.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

weights="" port=8000 gpus="" python="${SERVING_PYTHON:-python}" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --weights) needs_value "$1" $#; weights="$2"; shift 2 ;;
    --port) needs_value "$1" $#; port="$2"; shift 2 ;;
    --gpus) needs_value "$1" $#; gpus="$2"; shift 2 ;;
    --python) needs_value "$1" $#; python="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ -n "$weights" ] || die "--weights: not given; use the run's rollout.weights_dir"
case "$gpus" in *[!0-9]* | 0*) die "--gpus: found '$gpus'; use a number of GPUs, 1 or more" ;; esac

# Runs one copy of this script per GPU, and stops all of them on a signal. Returns the exit code of one
# that failed, or 0.
one_per_gpu() {
  local i command pid code=0 pids=()
  some_gpus 0 "$gpus" >/dev/null # all of them are there
  trap '{ kill $(jobs -p) || true; wait; } 2>/dev/null; exit 143' TERM INT
  for ((i = 0; i < gpus; i++)); do
    command=(bash "$launch_dir/sampler.sh" --weights "$weights" --port $((port + i)) --python "$python" ${rest[@]+"${rest[@]}"})
    if [ "$dry_run" = 1 ]; then
      printf 'CUDA_VISIBLE_DEVICES=%s ' "$(some_gpus "$i" 1)"
      printf '%q ' "${command[@]}" | sed 's/ $//'
      echo
      continue
    fi
    CUDA_VISIBLE_DEVICES="$(some_gpus "$i" 1)" "${command[@]}" &
    pids+=($!)
  done
  for pid in ${pids[@]+"${pids[@]}"}; do
    wait "$pid" || code=$?
  done
  return "$code"
}

# Prints the folder of the most recently written policy.
newest() {
  (ls -dt "$weights"/version-* "$weights"/*/version-* 2>/dev/null || true) | head -n 1
}

# Ignores the signal that Slurm sends before the time limit. It is meant for the learner, which may
# still be waiting for a batch from this server.
trap '' USR1
if [ -n "$gpus" ]; then
  code=0
  one_per_gpu || code=$?
  exit "$code"
fi
server=""
# On a signal, stops the server, waits until it has exited, and exits.
trap '[ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null; exit 143' TERM INT
export VLLM_SERVER_DEV_MODE=1
while :; do
  until folder="$(newest)" && [ -e "$folder/config.json" ]; do
    [ "$dry_run" = 0 ] || die "--weights: $weights holds no version-N yet"
    sleep 1
  done
  command=("$python" -m vllm.entrypoints.openai.api_server --model "$folder")
  # vLLM uses the last --host. Without the option, it listens on all interfaces.
  command+=(--served-model-name policy --host 127.0.0.1 --port "$port" --dtype bfloat16)
  command+=(--logprobs-mode processed_logprobs ${rest[@]+"${rest[@]}"})
  if [ "$dry_run" = 1 ]; then
    printf '%q ' "${command[@]}" | sed 's/ $//'
    echo
    exit 0
  fi
  "${command[@]}" &
  server=$!
  wait "$server" || echo "sampler: the server ended with $?; it is started again" >&2
  sleep 1
done
