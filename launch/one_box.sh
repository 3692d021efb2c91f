#!/usr/bin/env bash
# Trains on one machine, in one process that uses all its GPUs.
#
#   launch/one_box.sh [--gpu NAME] [--gpus N] [--dry-run] --config F [key.sub=value ...]
#
#   --gpu      settings to use: a100, hopper, blackwell, pcie, geforce (launch/*.env), or a GPU as
#              named by `bacr plan --device`; by default detected with nvidia-smi
#   --gpus     use only the first N GPUs (of CUDA_VISIBLE_DEVICES, if it is set)
#   --dry-run  print the settings and the command that would run, and do nothing
# All other arguments are passed to `bacr train`. The variable PYTHON selects the interpreter.
# BACR_DETERMINISTIC=1 makes runs bit-identical, but slower.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

gpu="" gpus="" dry_run=0 rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --gpu) needs_value "$1" $#; gpu="$2"; shift 2 ;;
    --gpus) needs_value "$1" $#; gpus="$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) show_help "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ ${#rest[@]} -gt 0 ] || die "command line: nothing to run; pass --config configs/NAME.yaml"
case "$gpus" in *[!0-9]* | 0*) die "--gpus: found '$gpus'; use a number of GPUs, 1 or more" ;; esac

gpu="${gpu:-$(detect_gpu)}"
load_environment "$gpu"
if [ -n "$gpus" ]; then
  CUDA_VISIBLE_DEVICES="$(some_gpus 0 "$gpus")"
  launch_exports+=(CUDA_VISIBLE_DEVICES)
  export CUDA_VISIBLE_DEVICES
fi
run_or_show "${PYTHON:-python}" -m bacr_jax.train "${rest[@]}"
