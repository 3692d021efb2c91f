"""Lists all checks of `bacr doctor`, in the order in which they run and are printed.

`__main__` imports this module only after it has parsed the command line, because the modules that
implement the checks import JAX.
"""

from bacr_doctor import draws, machine, paths, rates
from bacr_doctor.children import Check

# Config overrides that may work around a broken check (`Check.keys`).
_LEARNER_KEYS = {"model.attention": "xla"}
_SAMPLER_KEYS = {"rollout.attention": "xla"}
_REMAT_KEYS = {"model.remat": "full", "model.scan_layers": True}
# Advice for the user if a check is broken (`Check.advice`).
_REPORT = "report it with this page's JSON file; no run can be trusted on this machine"
_EXACT = "set model.compute_dtype=float32"
_SHORTER = f"{_EXACT}, or smaller data.max_prompt_tokens and budget.max"
_FOLDER = "set output.dir to a folder on another file system"
_ADDITIONS = "install jax 0.11.2 or newer, on Python 3.12 or newer"
_MODEL = "copy or download the folder again"
_TEMPLATE = "use the folder of an Instruct model"
_GRADER = "run pip install math-verify, or set grading.memory_mb=2048"
_COLLECTIVES = "set NCCL_P2P_DISABLE=1 or NCCL_DEBUG=INFO in the environment"
_PROCESSES = "set NCCL_DEBUG=INFO in the environment, and start one process per machine"

CHECKS = (
    Check("versions", machine.versions),
    Check("devices", machine.devices),
    Check("files", machine.files, advice=_FOLDER),
    Check("grader", machine.grader, advice=_GRADER),
    Check("model folder", machine.model, advice=_MODEL),
    Check("chat template", machine.template, advice=_TEMPLATE),
    Check("forward", paths.forward, ("float32",), advice=_REPORT),
    Check("decode", paths.decode, ("float32",), advice=_REPORT),
    Check("draws", draws.draws, advice=_REPORT),
    Check("update", paths.update, ("float32",), _REMAT_KEYS, _REPORT),
    Check("LoRA", paths.update, ("float32", 4), _REMAT_KEYS, _REPORT),
    Check("checkpoint", paths.checkpoint, advice=_FOLDER),
    Check("forward bfloat16", paths.forward, ("bfloat16",), _LEARNER_KEYS, _EXACT),
    Check("decode bfloat16", paths.decode, ("bfloat16",), _SAMPLER_KEYS, _EXACT),
    Check("update bfloat16", paths.update, ("bfloat16",), _LEARNER_KEYS, _EXACT),
    Check("sampler and learner", paths.mismatch),
    Check("long decode", paths.decode, (None,), _LEARNER_KEYS | _SAMPLER_KEYS, _SHORTER),
    Check("long update", paths.update, (None,), _LEARNER_KEYS, _SHORTER),
    Check("collectives", rates.collectives, advice=_COLLECTIVES),
    Check("two processes", paths.two_processes, advice=_PROCESSES),
    Check("rates", rates.rates),
    Check("additions", rates.additions, advice=_ADDITIONS),
    Check("plan", rates.plan),
)
