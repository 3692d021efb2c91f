# Sourced by the launch scripts: which GPUs are here, their settings, and how a command is shown. Recipes
# read their options by it.

launch_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

die() {
  echo "error: $1" >&2
  exit 2
}

# What --gpu may say, for messages.
gpu_names="a100, hopper, blackwell, pcie, geforce or a card of plan --device"

# The settings' name (launch/*.env) for the first GPU of this machine.
detect_gpu() {
  local name
  name="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)"
  case "$name" in
    *A100*) echo a100 ;;
    *H100* | *H200* | *H800* | *GH200*) echo hopper ;;
    *B200*) echo blackwell ;;
    *GeForce*) echo geforce ;;
    *" A10" | *" L4" | *" L40S" | *"RTX A6000") echo pcie ;;
    "") die "--gpu: nvidia-smi names no GPU here; write $gpu_names" ;;
    *) die "--gpu: no settings for '$name'; write the nearest of $gpu_names" ;;
  esac
}

# The settings' name for what --gpu says: that name itself, or a card as `plan --device` calls it.
settings_of() {
  case "$1" in
    a100 | hopper | blackwell | pcie | geforce) echo "$1" ;;
    a100-*) echo a100 ;;
    h100 | h200) echo hopper ;;
    b200) echo blackwell ;;
    a10 | l4 | l40s | a6000) echo pcie ;;
    rtx-4090 | rtx-5090) echo geforce ;;
    *) die "--gpu: found '$1'; write $gpu_names" ;;
  esac
}

# Reads the settings of $1 and exports them with those of every card; a variable that is already set
# is left alone. XLA takes the last of two equal flags, so flags that were set before stand behind
# ours and win.
load_environment() {
  local settings
  settings="$(settings_of "$1")"
  # JAX takes this share of each GPU's memory at the start; the rest is for the CUDA context, NCCL's
  # buffers and the workspaces of cuBLAS and cuDNN. `bacr plan` counts with the same share.
  : "${XLA_PYTHON_CLIENT_MEM_FRACTION:=0.92}"
  # Compiled programs are kept, so that a restarted run doesn't compile again.
  : "${JAX_COMPILATION_CACHE_DIR:=${HOME:-.}/.cache/bacr_jax/xla}"
  # NCCL says why it could not connect.
  : "${NCCL_DEBUG:=WARN}"
  launch_exports=(XLA_PYTHON_CLIENT_MEM_FRACTION JAX_COMPILATION_CACHE_DIR NCCL_DEBUG)
  # shellcheck source=/dev/null
  . "$launch_dir/$settings.env"
  if [ "${BACR_DETERMINISTIC:-0}" = 1 ]; then
    # Sums in a fixed order and no timing of kernels at the start: two runs agree bit for bit, at
    # the price of slower scatters (the embedding's gradient) and attention.
    launch_xla_flags+=(--xla_gpu_deterministic_ops=true)
  fi
  XLA_FLAGS="${launch_xla_flags[*]}${XLA_FLAGS:+ $XLA_FLAGS}"
  launch_exports+=(XLA_FLAGS)
  export "${launch_exports[@]}"
}

# GPUs of this process from number $1 on, as many as $2 says: of those in CUDA_VISIBLE_DEVICES where
# that is set, as in an allocation or on a box that others use too.
some_gpus() {
  local there
  IFS=, read -r -a there <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 + $2 - 1)))}"
  [ ${#there[@]} -ge $(($1 + $2)) ] ||
    die "CUDA_VISIBLE_DEVICES: found $CUDA_VISIBLE_DEVICES; write $(($1 + $2)) GPUs, or unset it"
  (IFS=, && echo "${there[*]:$1:$2}")
}

# Puts this Slurm job back into the queue if its training, which ended with $1, can go on from a
# checkpoint (75): near the time limit, or after a host or all servers were lost. A job that is being
# cancelled stays cancelled. Training itself gives a job up that is restarted again and again without
# a new checkpoint (bacr_jax.runs.restarts); it then ends with another code.
requeue_if_due() {
  [ "$1" = 75 ] || return 0
  local state
  state="$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null || true)"
  case "$state" in
    CANCELLED* | COMPLETING*) return 0 ;;
  esac
  scontrol requeue "$SLURM_JOB_ID" ||
    die "scontrol requeue failed: job $SLURM_JOB_ID is not put back into the queue; submit it again"
}

# With $dry_run = 1 prints the settings and the command, else becomes the command.
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

# The header of script $1: its comment lines up to the first blank one.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$1"
}

# The value that option $1 needs ($# of the rest in $2).
needs_value() {
  [ "$2" -ge 2 ] || die "$1: a value is missing; see --help"
}
