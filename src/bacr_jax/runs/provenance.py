"""Records the provenance of a checkpoint: config, inputs, software, options of JAX and devices.

A resumed run compares the provenance of its checkpoint with its current inputs before it continues.
"""

import contextlib
import dataclasses
import hashlib
import json
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bacr_jax.config.values import written
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.questions.question_set import QuestionSet


def commit() -> str:
    """Returns the git commit of this package, or "" if it is not in a git repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


# Packages whose version can affect the results of a run.
VERSIONED = (
    *("bacr_jax", "jax", "jaxlib", "flax", "optax", "numpy"),
    # The order of the questions, and the verdicts of the grader.
    *("grain", "sympy", "latex2sympy2_extended"),
)
# Options of JAX that change the rounding of results. `processes.check_platform` refuses options
# with larger effects.
_SWITCHES = (
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_softmax_custom_jvp",
)
# Key of the model's configuration in the metadata of checkpoints.
_MODEL = "model_config"
# Fields of the model's configuration that do not change what its weights compute.
_NO_EFFECT = ("max_positions",)


def switches() -> dict[str, str]:
    """Returns the values of the options of JAX that change the rounding of results, by name."""
    values = {}
    for name in _SWITCHES:
        # Only some options have an attribute, which includes the value of a context manager.
        values[name] = str(getattr(jax.config, name, jax.config.values.get(name)))
    return values


def backend() -> str:
    """Returns the versions of JAX's backend, which contain the version of CUDA on NVIDIA GPUs."""
    return ", ".join(jax.devices()[0].client.platform_version.splitlines())


def driver() -> str:
    """Returns the version of the NVIDIA driver, or "" if it is not installed."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().split("\n")[0] if path.is_file() else ""


def processor() -> str:
    """Returns the kind of processor, such as "x86_64 AMD EPYC, family 25".

    Processors of different kinds round sums in different orders, so runs of the same seed differ.
    The model and family are left out on systems without /proc/cpuinfo.
    """
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    kind = platform.machine()
    if "model name" in fields:
        kind = f"{kind} {fields['model name']}"
    if "cpu family" in fields:
        kind = f"{kind}, family {fields['cpu family']}"
    return kind


def machine() -> dict[str, str]:
    """Returns the properties of this machine that determine the rounding of results, by name."""
    if jax.devices()[0].platform == "cpu":
        return {"processor": processor()}
    return {"backend": backend(), "driver": driver()}


def data_fingerprint(questions: QuestionSet) -> str:
    """Returns a digest of the ids, texts, answers and difficulty groups of questions, in order."""
    content = [questions.ids, questions.questions, questions.answers, questions.groups.tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _eval_fingerprints(entries: Sequence[str], evaluated: Sequence[QuestionSet]) -> dict[str, str]:
    """Returns the digests of the evaluation sets, keyed by name.

    Sets with equal names, such as two tables, are keyed by their entries of `data.eval`.

    Args:
      entries: `data.eval` of the run's config.
      evaluated: the set of each entry. Empty to record no digests.
    """
    if not evaluated:
        return {}
    num_sets = Counter(questions.name for questions in evaluated)
    fingerprints = {}
    for entry, questions in zip(entries, evaluated, strict=True):
        key = questions.name if num_sets[questions.name] == 1 else entry
        fingerprints[key] = data_fingerprint(questions)
    return fingerprints


def provenance(
    values: Mapping[str, Any],
    fingerprint: str,
    questions: QuestionSet,
    mesh: Mesh | None,
    evaluated: Sequence[QuestionSet] = (),
    verifiers: Mapping[str, str] | None = None,
    prompts: Mapping[str, str] | None = None,
    method_digest: str | None = None,
    model: Qwen2Config | None = None,
) -> dict[str, Any]:
    """Returns the provenance of a checkpoint, serializable as JSON.

    Args:
      values: values of the run's config, keyed by dotted name.
      fingerprint: fingerprint of the config (`config.io.fingerprint`).
      questions: training questions.
      mesh: device mesh of the run, or None for a single device.
      evaluated: the evaluation set of each entry of `data.eval`. Empty to record no digests.
      verifiers: digests of the source files of verifiers (the user's grading functions), keyed by
        config key and value (`Verifier.named`). None without verifiers.
      prompts: digests of the prompts, from `TaskData.prompt_fingerprints`. None to record no
        digests.
      method_digest: digest of the file of a user-defined method (`Method.source_digest`).
      model: configuration of the model. None to record no configuration.
    """
    key = f"method={values['method']}"
    return {
        "seed": values["seed"],
        "config": json.loads(json.dumps(values)),
        "config_fingerprint": fingerprint,
        "data_fingerprint": data_fingerprint(questions),
        "evaluated_fingerprints": _eval_fingerprints(values["data.eval"], evaluated),
        "verifier_fingerprints": dict(verifiers or {}),
        "method_fingerprints": {key: method_digest} if method_digest else {},
        "prompt_fingerprints": dict(prompts or {}),
        **({} if model is None else model_record(model)),
        "versions": {name: version(name) for name in VERSIONED},
        "machine": machine(),
        "switches": switches(),
        "mesh": {} if mesh is None else {name: int(size) for name, size in mesh.shape.items()},
        "devices": [jax.device_count(), jax.devices()[0].device_kind],
    }


def check_same_inputs(
    then: Mapping[str, Any], now: Mapping[str, Any], values: Mapping[str, Any], run: Path
) -> None:
    """Checks that a run continues with the same questions, code, prompts and model.

    Args:
      then: provenance of the checkpoint.
      now: provenance of the current inputs.
      values: values of the run's config, keyed by dotted name.
      run: run folder, for error messages.

    Raises:
      UserError: if an input differs.
    """
    check_same_questions(then, now, values["data.train"], run)
    check_same_prompts(then, now["prompt_fingerprints"], values, run)
    if values["model.path"] is not None:
        check_same_model(then, now, f"model.path={values['model.path']}", f"the run in {run}")


def model_record(model: Qwen2Config) -> dict[str, Any]:
    """Returns the entry of a model's configuration in metadata, serializable as JSON."""
    return {_MODEL: dataclasses.asdict(model)}


def check_same_model(
    then: Mapping[str, Any], now: Mapping[str, Any], where: str, trained: str
) -> None:
    """Checks that the config.json of a model folder describes the model that was trained.

    Only the fields that both configurations contain are compared.

    Args:
      then: metadata of the checkpoint, which may contain `model_record`.
      now: `model_record` of the model folder, possibly with other entries.
      where: option or config key that contains the folder, for the error message.
      trained: description of what was trained, for the error message.

    Raises:
      UserError: if fields differ.
    """
    before = then.get(_MODEL, {})
    current = json.loads(json.dumps(now.get(_MODEL, {})))
    changes = []
    for name, value in current.items():
        if name not in _NO_EFFECT and before.get(name, value) != value:
            changes.append(f"{name} is {value} instead of {before[name]}")
    if changes:
        raise UserError(
            f"{where}: its config.json differs from the one with which {trained} was started "
            f"({', '.join(changes)}); restore the original file, or use another folder "
            "for a new run"
        )


def check_same_questions(
    then: Mapping[str, Any], now: Mapping[str, Any], train: str | Sequence[str], run: Path
) -> None:
    """Checks that a run continues with the same questions, verifiers and method.

    Args:
      then: provenance of the checkpoint.
      now: provenance of the current inputs.
      train: `data.train` of the run's config.
      run: run folder, for error messages.

    Raises:
      UserError: if the questions differ, or the source file of a verifier or of the method.
    """
    advice = "restore the original file, or use another output.dir to start a new run"
    if then["data_fingerprint"] != now["data_fingerprint"]:
        raise UserError(
            f"data.train={written(train)}: the questions differ from those that the run in {run} "
            f"was trained on; {advice}"
        )
    for name in _changed_eval_sets(then, now):
        raise UserError(
            f"data.eval: the questions of {name} have changed since the last evaluation of the "
            f"run in {run}; {advice}; to evaluate a finished run on other questions, use bacr "
            "evaluate --run"
        )
    for code, group in (
        ("the code that grades answers", "verifier_fingerprints"),
        ("the code of the method", "method_fingerprints"),
    ):
        _check_same_code(code, then[group], now[group], run)


def _changed_eval_sets(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of the evaluation sets that differ between two provenances, sorted.

    A set with another name but the same questions does not differ, because it was only moved.
    """
    before = then["evaluated_fingerprints"]
    current = now["evaluated_fingerprints"]
    shared_names = before.keys() & current.keys()
    only_before = {name: before[name] for name in before.keys() - shared_names}
    only_now = {name: current[name] for name in current.keys() - shared_names}
    changed = [name for name in shared_names if before[name] != current[name]]
    changed += [name for name, digest in only_before.items() if digest not in only_now.values()]
    changed += [name for name, digest in only_now.items() if digest not in only_before.values()]
    return sorted(changed)


def _check_same_code(
    code: str, before: Mapping[str, str], now: Mapping[str, str], run: Path
) -> None:
    """Checks that the user's files have the same content as when a run was started.

    A file that is missing in `before` is not checked, because it is another file, which
    --allow-change has already permitted.

    Args:
      code: description of the files, for the error message.
      before: digests of the files of the checkpoint, keyed by config key and value.
      now: digests of the current files.
      run: run folder, for the error message.

    Raises:
      UserError: if a file has changed.
    """
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            raise UserError(
                f"{name}: {code} was changed after the run in {run} was started; restore the file, "
                "use another output.dir, or give the new file another name and pass "
                f"--allow-change {name.partition('=')[0]}"
            )


# Config keys that change the prompts. Users can change them only deliberately, with --allow-change.
_PROMPT_KEYS = (
    "data.prompt_format",
    "data.system_prompt",
    "data.template_variables",
    "data.prompt_date",
    "data.closing_text",
    "data.max_prompt_tokens",
    "conditioning.budget_input",
    "conditioning.prompt_text",
    "budget.max",
    "eval.budgets",
    "method",
)


def check_same_prompts(
    then: Mapping[str, Any], now: Mapping[str, str], values: Mapping[str, Any], run: Path
) -> None:
    """Checks that a checkpoint is used with the same tokenizer, chat template and prompts.

    Checkpoints that contain no digests of their prompts are not checked.

    Args:
      then: provenance of the checkpoint.
      now: current digests, all or some of `TaskData.prompt_fingerprints`.
      values: values of the config with which `now` was computed, keyed by dotted name.
      run: run folder, for error messages.

    Raises:
      UserError: if the tokenizer, the chat template or the prompts differ.
    """
    before = then.get("prompt_fingerprints")
    if not before:
        return
    settings = json.loads(json.dumps(dict(values)))
    changed = any(then["config"].get(key) != settings[key] for key in _PROMPT_KEYS)
    key = "model.tokenizer" if values["model.tokenizer"] else "model.path"
    folder = f"{key}={values[key]}"
    advice = "restore the original files, or use another output.dir to start a new run"
    for name, digest in now.items():
        if before.get(name, digest) == digest:
            continue
        if name == "tokenizer":
            raise UserError(
                f"{folder}: the vocabulary of its tokenizer differs from the one that the run in "
                f"{run} was trained with; {advice}"
            )
        if changed:
            continue
        if name == "template":
            raise UserError(
                f"{folder}: its chat template differs from the one that the run in {run} was "
                f"trained with, so prompts or the tokens that end a turn would differ; {advice}"
            )
        raise UserError(
            f"{folder}: with this tokenizer, the prompts of {name} have different token ids than "
            f"in the run in {run}; {advice}"
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note for each difference that prevents a resumed run from being bit-identical.

    Args:
      then: provenance of the checkpoint.
      now: provenance of the current inputs.
    """
    for group in ("versions", "devices", "mesh", "machine", "switches"):
        before = then[group]
        after = now[group]
        if group not in ("devices", "mesh"):
            before, after = _changed_entries(before, after)
        if before != after:
            yield (
                f"note: {group} changed from {before} to {after}; the run continues, but its "
                "results may not be bit-identical to those of an uninterrupted run"
            )


def _changed_entries(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the entries of two dicts whose values differ.

    Entries of only one dict are left out. They are properties of another kind of device, which the
    group "devices" contains.
    """
    names = [name for name in before if before[name] != after.get(name, before[name])]
    return {name: before[name] for name in names}, {name: after[name] for name in names}
