#!/usr/bin/env bash
# Trains on several machines without Slurm. Run this script once on each machine.
#
#   launch/hosts.sh --coordinator HOST:PORT --processes N --process-id I [--gpu NAME]
#       [--dry-run] --config F [key.sub=value ...]
#
#   --coordinator  machine 0 and a free port on it; the same value on all machines
#   --processes    number of machines
#   --process-id   index of this machine, 0 to N - 1
#   --gpu          settings to use (launch/*.env); by default detected with nvidia-smi
#   --dry-run      print the settings and the command that would run, and do nothing
# All other arguments are passed to `bacr train` and must be the same on all machines. The run folder
# must be on a file system that all machines share.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

gpu="" coordinator="" processes="" index="" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --gpu) needs_value "$1" $#; gpu="$2"; shift 2 ;;
    --coordinator) needs_value "$1" $#; coordinator="$2"; shift 2 ;;
    --processes) needs_value "$1" $#; processes="$2"; shift 2 ;;
    --process-id) needs_value "$1" $#; index="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; pass --config configs/NAME.yaml"
case "$coordinator" in
  ?*:[0-9]*) ;;
  *) die "--coordinator: found '$coordinator'; use machine 0 and a port, such as node0:12355" ;;
esac
case "$processes" in
  "" | *[!0-9]* | 0*) die "--processes: found '$processes'; use the number of machines" ;;
esac
case "$index" in
  "" | *[!0-9]*) die "--process-id: found '$index'; use 0 to $((processes - 1))" ;;
esac
[ "$index" -lt "$processes" ] || die "--process-id: found $index; use 0 to $((processes - 1))"

gpu="${gpu:-$(detect_gpu)}"
load_environment "$gpu"
JAX_COORDINATOR_ADDRESS="$coordinator" JAX_NUM_PROCESSES="$processes" JAX_PROCESS_ID="$index"
launch_exports+=(JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID)
export "${launch_exports[@]}"
run_or_show "${PYTHON:-python}" -m bacr_jax.train "${rest[@]}"
