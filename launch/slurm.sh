#!/usr/bin/env bash
# Trains on several nodes with Slurm. Each node runs one process that uses all GPUs of the node.
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh [--gpu NAME] [--dry-run] \
#       [--container-image IMAGE [--container-mounts A:B,...]] --config F [key.sub=value ...]
#
#   --gpu               settings to use (launch/*.env); by default detected with nvidia-smi on the
#                       first node
#   --container-image   run in this image (launch/Dockerfile builds one); needs pyxis and enroot. The
#                       project folder is mounted and is the working directory
#   --container-mounts  other folders that the run needs, for its data, model and output
#   --dry-run           print the settings and the command that would run, and do nothing (also
#                       outside Slurm)
# All other arguments are passed to `bacr train`. The mesh spans the GPUs of all nodes
# (mesh.data=NODES keeps the all-gathers of parameters within a node). The run folder must be on a
# file system that all nodes share. The processes find each other through Slurm's environment
# variables. Five minutes before its time limit, the job saves a checkpoint and is requeued; the same
# command then resumes the run. A job that has lost a process or a host is requeued as well. A job that
# is cancelled with scancel, or that was restarted five times without a new checkpoint, is not
# requeued. Run from the project folder.

#SBATCH --job-name=bacr_jax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
# Sends SIGUSR1 five minutes before the time limit.
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log

set -euo pipefail
# Slurm runs a copy of this file in another folder. SLURM_SUBMIT_DIR is the folder in which sbatch was
# called.
here="$(dirname "${BASH_SOURCE[0]}")"
[ -f "$here/environment.sh" ] || here="${SLURM_SUBMIT_DIR:-.}/launch"
if [ ! -f "$here/environment.sh" ]; then
  echo "error: no launch/environment.sh in ${SLURM_SUBMIT_DIR:-.}; run sbatch in the project's folder" >&2
  exit 2
fi
. "$here/environment.sh"

gpu="" image="" mounts="" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --gpu) needs_value "$1" $#; gpu="$2"; shift 2 ;;
    --container-image) needs_value "$1" $#; image="$2"; shift 2 ;;
    --container-mounts) needs_value "$1" $#; mounts="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$here/slurm.sh"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; pass --config configs/NAME.yaml"
if [ "$dry_run" = 0 ] && [ -z "${SLURM_JOB_ID:-}" ]; then
  die "not in a Slurm job; run sbatch --nodes N launch/slurm.sh ..., or add --dry-run"
fi

[ -n "$image" ] || [ -z "$mounts" ] || die "--container-mounts: no image; pass --container-image"

gpu="${gpu:-$(detect_gpu)}"
load_environment "$gpu"
container=()
if [ -n "$image" ]; then
  container=(--container-image="$image" --container-mounts="$PWD:$PWD${mounts:+,$mounts}")
  container+=(--container-workdir="$PWD")
fi
if [ "$dry_run" = 0 ]; then
  # Training creates this file to give up the job (see requeue_if_due).
  export BACR_GIVE_UP_FILE="$PWD/slurm-$SLURM_JOB_ID.given-up"
fi
# If one process is lost, the other processes exit with code 75. srun must not kill them when the
# first one exits, because a process that is killed requeues the job, even after bad input (code 2).
code=0
(run_or_show srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 ${container[@]+"${container[@]}"} \
  "${PYTHON:-python}" -m bacr_jax.train "${rest[@]}") || code=$?
(requeue_if_due "$code") || true
exit "$code"
