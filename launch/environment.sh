# Functions that the launch scripts source: detect the GPUs, load their settings, and run or print a
# command. The recipes also use its functions for parsing options.

launch_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

die() {
  echo "error: $1" >&2
  exit 2
}

# Possible values of --gpu, for error messages.
gpu_names="a100, hopper, blackwell, pcie, geforce or a card of plan --device"

# Prints the name of the settings (launch/*.env) for the first GPU of this machine.
detect_gpu() {
  local name
  name="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)"
  case "$name" in
    *A100*) echo a100 ;;
    *H100* | *H200* | *H800* | *GH200*) echo hopper ;;
    *B200*) echo blackwell ;;
    *GeForce*) echo geforce ;;
    *" A10" | *" L4" | *" L40S" | *"RTX A6000") echo pcie ;;
    "") die "--gpu: nvidia-smi names no GPU here; use $gpu_names" ;;
    *) die "--gpu: no settings for '$name'; use the nearest of $gpu_names" ;;
  esac
}

# Prints the name of the settings for a value of --gpu. The value is either such a name, or a GPU as
# named by `bacr plan --device`.
settings_of() {
  case "$1" in
    a100 | hopper | blackwell | pcie | geforce) echo "$1" ;;
    a100-*) echo a100 ;;
    h100 | h200) echo hopper ;;
    b200) echo blackwell ;;
    a10 | l4 | l40s | a6000) echo pcie ;;
    rtx-4090 | rtx-5090) echo geforce ;;
    *) die "--gpu: found '$1'; use $gpu_names" ;;
  esac
}

# Loads the settings for GPU $1 and the settings for all GPUs, and exports them. A variable that is
# already set keeps its value. Flags that are already in XLA_FLAGS are appended after ours, because
# XLA uses the last value of a repeated flag.
load_environment() {
  local settings
  settings="$(settings_of "$1")"
  # JAX preallocates this fraction of each GPU's memory. The rest is for the CUDA context, NCCL's
  # buffers, and the workspaces of cuBLAS and cuDNN. `bacr plan` assumes the same fraction. jaxlib
  # refuses to start if both variables are set.
  local fraction=XLA_CLIENT_MEM_FRACTION
  if [ -z "${XLA_CLIENT_MEM_FRACTION:-}" ]; then
    fraction=XLA_PYTHON_CLIENT_MEM_FRACTION
    : "${XLA_PYTHON_CLIENT_MEM_FRACTION:=0.92}"
  fi
  # Also caches programs that compile fast if JAX_COMPILATION_CACHE_DIR is set. Without this variable,
  # bacr train caches them in a folder whose size it limits.
  : "${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:=0}"
  # NCCL prints the reason if it can't connect.
  : "${NCCL_DEBUG:=WARN}"
  launch_exports=("$fraction" NCCL_DEBUG)
  launch_exports+=(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS)
  # shellcheck source=/dev/null
  . "$launch_dir/$settings.env"
  if [ "${BACR_DETERMINISTIC:-0}" = 1 ]; then
    # Uses deterministic reductions and selects kernels without timing, so that runs are
    # bit-identical. Scatters (in the gradient of the embedding) and attention become slower.
    launch_xla_flags+=(--xla_gpu_deterministic_ops=true)
  fi
  XLA_FLAGS="${launch_xla_flags[*]}${XLA_FLAGS:+ $XLA_FLAGS}"
  launch_exports+=(XLA_FLAGS)
  export "${launch_exports[@]}"
}

# Prints the ids of $2 GPUs, starting with GPU number $1. If CUDA_VISIBLE_DEVICES is set, for example
# in an allocation or on a shared machine, only its GPUs are counted.
some_gpus() {
  local there
  IFS=, read -r -a there <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 + $2 - 1)))}"
  [ ${#there[@]} -ge $(($1 + $2)) ] ||
    die "CUDA_VISIBLE_DEVICES: found $CUDA_VISIBLE_DEVICES; use $(($1 + $2)) GPUs, or unset it"
  (IFS=, && echo "${there[*]:$1:$2}")
}

# Requeues this Slurm job if the exit code $1 of training is 75, or 128 or more. Training exits with 75
# if it can be resumed from a checkpoint: near the time limit, or after losing a host or all servers. A
# code of 128 or more means that a signal killed a process, for example because the memory of its host
# ran out. If a process was killed, srun returns 128 plus the highest signal (253 if its memory ran
# out), and otherwise the highest code of all processes. A job that is being cancelled is not requeued.
# If a job was restarted several times without a new checkpoint, training creates $BACR_GIVE_UP_FILE and
# exits with code 76 (bacr_jax.runs.restarts), and the job is not requeued. The code is not sufficient
# if another process is killed.
requeue_if_due() {
  if [ -e "${BACR_GIVE_UP_FILE:-}" ]; then
    rm -f "$BACR_GIVE_UP_FILE"
    return 0
  fi
  [ "$1" = 75 ] || [ "$1" -ge 128 ] || return 0
  local state
  state="$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null || true)"
  case "$state" in
    CANCELLED* | COMPLETING*) return 0 ;;
  esac
  scontrol requeue "$SLURM_JOB_ID" ||
    die "scontrol requeue failed: job $SLURM_JOB_ID is not put back into the queue; submit it again"
}

# Replaces this process by the command. If $dry_run is 1, only prints the settings and the command.
run_or_show() {
  if [ "$dry_run" != 1 ]; then
    exec "$@"
  fi
  local name
  for name in "${launch_exports[@]}"; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf '%q ' "$@" | sed 's/ $//'
  echo
}

# Prints the header of script $1: its comment lines up to the first empty line.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$1"
}

# Checks that option $1 has a value. $2 is the number of remaining arguments, including the option.
needs_value() {
  [ "$2" -ge 2 ] || die "$1: a value is missing; see --help"
}
