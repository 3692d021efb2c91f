#!/usr/bin/env bash
# Several nodes under Slurm: one process per node, which drives all GPUs of its node.
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh [--gpu NAME] [--dry-run] \
#       [--container-image IMAGE [--container-mounts A:B,...]] --config F [key.sub=value ...]
#
#   --gpu               settings to use (launch/*.env); by nvidia-smi on the first node if not given
#   --container-image   run in this image (launch/Dockerfile makes one), where pyxis and enroot are
#                       installed; the project's folder is mounted and is where the command runs
#   --container-mounts  further folders that the run needs, for its data, model and output
#   --dry-run           print the settings and the command that would run, and do nothing (also
#                       outside Slurm)
# All else goes to `bacr train`, with the mesh over the GPUs of all nodes
# (mesh.data=NODES keeps the gathering of parameters inside a node). The run folder must be on a file
# system that all nodes see. Processes find each other by Slurm's variables; nothing is to be set.
# Five minutes before its time limit the job saves a checkpoint and goes back into the queue, where
# the same command goes on with it; so does a job that has lost a host. scancel ends it for good. A job
# that was restarted five times without a new checkpoint is given up. Run from the project's folder.

#SBATCH --job-name=bacr_jax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
# SIGUSR1 five minutes before the end of the time limit.
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log

set -euo pipefail
# Slurm runs a copy of this file, kept elsewhere; SLURM_SUBMIT_DIR is where sbatch was called.
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
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; write --config configs/NAME.yaml"
if [ "$dry_run" = 0 ] && [ -z "${SLURM_JOB_ID:-}" ]; then
  die "not in a Slurm job; write sbatch --nodes N launch/slurm.sh ..., or add --dry-run"
fi

[ -n "$image" ] || [ -z "$mounts" ] || die "--container-mounts: no image; write --container-image"

gpu="${gpu:-$(detect_gpu)}"
load_environment "$gpu"
container=()
if [ -n "$image" ]; then
  container=(--container-image="$image" --container-mounts="$PWD:$PWD${mounts:+,$mounts}")
  container+=(--container-workdir="$PWD")
fi
# Processes end by themselves, with code 75, where one of them is lost. The first to end must not
# have the others killed: its signal would take the place of the code by which a job goes on.
code=0
(run_or_show srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 ${container[@]+"${container[@]}"} \
  "${PYTHON:-python}" -m bacr_jax.train "${rest[@]}") || code=$?
(requeue_if_due "$code") || true
exit "$code"
