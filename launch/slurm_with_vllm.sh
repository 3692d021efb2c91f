#!/usr/bin/env bash
# Trains on several nodes with Slurm and vLLM (rollout.engine=vllm). The first node is the learner and
# uses all its GPUs. Each other node runs a vLLM server per GPU, on the ports 8000, 8001, ... Anyone who can
# connect to these ports can replace the policy (launch/sampler.sh), so use a private network. The policy
# must fit on one GPU in bfloat16. Not tested on GPUs yet.
#
#   sbatch --nodes 3 launch/slurm_with_vllm.sh --weights DIR [--gpu NAME] [--python PYTHON]
#       [--dry-run] --config F [key.sub=value ...]
#
#   --weights  folder on a file system that all nodes share, from which the servers load policies
#   --gpu      settings of the learner (launch/*.env); by default detected with nvidia-smi on the
#              first node
#   --python   interpreter of the environment with vLLM and the plugin, as in launch/sampler.sh
#   --dry-run  print the two commands, for the nodes in BACR_NODES, and do nothing
# All other arguments are passed to `bacr train`, such as rollout.async_steps=1. As in launch/slurm.sh, the
# job saves a checkpoint and is requeued five minutes before its time limit, or after all servers are
# lost. It is also requeued if a signal kills training.

#SBATCH --job-name=bacr_jax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log

set -euo pipefail
# Slurm runs a copy of this file in another folder, as in slurm.sh.
here="$(dirname "${BASH_SOURCE[0]}")"
[ -f "$here/environment.sh" ] || here="${SLURM_SUBMIT_DIR:-.}/launch"
if [ ! -f "$here/environment.sh" ]; then
  echo "error: no launch/environment.sh in ${SLURM_SUBMIT_DIR:-.}; run sbatch in the project's folder" >&2
  exit 2
fi
. "$here/environment.sh"

weights="" gpu="" python="${SERVING_PYTHON:-python}" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --weights) needs_value "$1" $#; weights="$2"; shift 2 ;;
    --gpu) needs_value "$1" $#; gpu="$2"; shift 2 ;;
    --python) needs_value "$1" $#; python="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$here/slurm_with_vllm.sh"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; pass --config configs/NAME.yaml"
[ -n "$weights" ] || die "--weights: not given; use a folder that all nodes see"
if [ "$dry_run" = 0 ]; then
  [ -n "${SLURM_JOB_ID:-}" ] || die "not in a Slurm job; run sbatch --nodes N, or add --dry-run"
  BACR_NODES="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
fi
read -r -d '' -a nodes <<<"${BACR_NODES:-}" || true
[ ${#nodes[@]} -ge 2 ] || die "--nodes: found ${#nodes[@]}; use 2 or more, one learns"

gpu="${gpu:-$(detect_gpu)}"
load_environment "$gpu"
# One server per GPU, because vLLM splits a model only if the number of its attention heads is divisible
# by the number of GPUs: Qwen2.5-1.5B has 12 and Qwen2.5-7B has 28.
samplers=("${nodes[@]:1}") gpus="${SLURM_GPUS_ON_NODE:-8}" urls=""
for node in "${samplers[@]}"; do
  for ((i = 0; i < gpus; i++)); do
    urls+="${urls:+, }http://$node:$((8000 + i))"
  done
done
servers=(srun --overlap --nodes "${#samplers[@]}" --ntasks "${#samplers[@]}")
servers+=(--nodelist "$(IFS=, && echo "${samplers[*]}")" "$here/sampler.sh" --weights "$weights")
servers+=(--python "$python" --gpus "$gpus" --host 0.0.0.0) # reachable by the learner's node
train=(srun --overlap --nodes 1 --ntasks 1 --nodelist "${nodes[0]}")
train+=("${PYTHON:-python}" -m bacr_jax.train "${rest[@]}" rollout.engine=vllm)
train+=("rollout.urls=[$urls]" "rollout.weights_dir=$weights")
if [ "$dry_run" = 1 ]; then
  printf '%q ' "${servers[@]}"
  echo
  run_or_show "${train[@]}"
  exit 0
fi

"${servers[@]}" &
# Training continues without a server that fails. When training ends, the servers are stopped.
trap 'kill %1 2>/dev/null || true' EXIT
code=0
"${train[@]}" || code=$?
(requeue_if_due "$code") || true
exit "$code"
