"""The lines of the page."""

from bacr_doctor import draws, machine, paths, rates
from bacr_doctor.children import Check

_LEARNER, _SAMPLER = {"model.attention": "xla"}, {"rollout.attention": "xla"}
_REMAT = {"model.remat": "full", "model.scan_layers": True}
_REPORT = "report it with this page's JSON file; no run can be trusted on this machine"
_EXACT = "write model.compute_dtype=float32"
_SHORTER = f"{_EXACT}, or smaller data.max_prompt_tokens and budget.max"
_FOLDER = "write output.dir=FOLDER on another file system"
_ADDITIONS = "install jax 0.11.2 or newer, on Python 3.12 or newer"
# In the order of the page; a name, what does it, and what to do where it breaks.
CHECKS = (
    Check("versions", machine.versions),
    Check("devices", machine.devices),
    Check("files", machine.files, advice=_FOLDER),
    Check("grader", machine.grader, advice="pip install math-verify, grading.memory_mb=2048"),
    Check("model folder", machine.model, advice="copy or download the folder again"),
    Check("chat template", machine.template, advice="write the folder of an Instruct model"),
    Check("forward", paths.forward, ("float32",), advice=_REPORT),
    Check("decode", paths.decode, ("float32",), advice=_REPORT),
    Check("draws", draws.draws, advice=_REPORT),
    Check("update", paths.update, ("float32",), _REMAT, _REPORT),
    Check("LoRA", paths.update, ("float32", 4), _REMAT, _REPORT),
    Check("checkpoint", paths.checkpoint, advice=_FOLDER),
    Check("forward bfloat16", paths.forward, ("bfloat16",), _LEARNER, _EXACT),
    Check("decode bfloat16", paths.decode, ("bfloat16",), _SAMPLER, _EXACT),
    Check("update bfloat16", paths.update, ("bfloat16",), _LEARNER, _EXACT),
    Check("sampler and learner", paths.mismatch),
    Check("long decode", paths.decode, (None,), _LEARNER | _SAMPLER, _SHORTER),
    Check("long update", paths.update, (None,), _LEARNER, _SHORTER),
    Check("collectives", rates.collectives, advice="NCCL_P2P_DISABLE=1, NCCL_DEBUG=INFO"),
    Check("two processes", paths.two_processes, advice="NCCL_DEBUG=INFO, one process a box"),
    Check("rates", rates.rates),
    Check("additions", rates.additions, advice=_ADDITIONS),
    Check("plan", rates.plan),
)
