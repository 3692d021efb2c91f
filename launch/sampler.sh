#!/usr/bin/env bash
# A server of vLLM that samples for a training run (rollout.engine=vllm): waits for the run's first
# policy, serves the newest one, and is started again if it ends. The run hands over all later ones.
# Not run on GPUs yet.
#
#   launch/sampler.sh --weights DIR [--port P] [--python PYTHON] [--dry-run] [--option ...]
#
#   --weights  rollout.weights_dir of the run, or the run's own folder in it
#   --port     where it listens (8000)
#   --python   of the environment with vLLM and the plugin (integrations/vllm); SERVING_PYTHON, or
#              python, if not given
#   --dry-run  print the command that would run on the newest policy, and do nothing
# All else goes to vLLM, such as --dtype float32 or --tensor-parallel-size 2. Whoever reaches the
# port can replace the policy: set VLLM_API_KEY, and keep it inside a network of your own.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

weights="" port=8000 python="${SERVING_PYTHON:-python}" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --weights) needs_value "$1" $#; weights="$2"; shift 2 ;;
    --port) needs_value "$1" $#; port="$2"; shift 2 ;;
    --python) needs_value "$1" $#; python="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ -n "$weights" ] || die "--weights: not given; write the run's rollout.weights_dir"

# The policy that was written last.
newest() {
  (ls -dt "$weights"/version-* "$weights"/*/version-* 2>/dev/null || true) | head -n 1
}

server=""
# It goes when its server has gone.
trap '[ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null; exit 143' TERM INT
# Slurm's warning is for the learner, which may still wait for a batch.
trap '' USR1
export VLLM_SERVER_DEV_MODE=1
while :; do
  until folder="$(newest)" && [ -e "$folder/config.json" ]; do
    [ "$dry_run" = 0 ] || die "--weights: $weights holds no version-N yet"
    sleep 1
  done
  command=("$python" -m vllm.entrypoints.openai.api_server --model "$folder")
  command+=(--served-model-name policy --port "$port" --dtype bfloat16)
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
