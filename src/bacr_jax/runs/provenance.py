"""Where the state of a checkpoint comes from: config, questions, software, devices."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import written
from bacr_jax.errors import UserError
from bacr_jax.questions.question_set import QuestionSet


def commit() -> str:
    """The commit of this package, if it runs from a clone; empty otherwise."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


# Software whose version can change what a run computes.
VERSIONED = ("bacr_jax", "jax", "jaxlib", "flax", "optax", "numpy")


def data_fingerprint(questions: QuestionSet) -> str:
    """Identifies questions by their ids, texts, answers and difficulty groups, in their order."""
    content = [questions.ids, questions.questions, questions.answers, questions.groups.tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def provenance(
    config: Config,
    questions: QuestionSet,
    mesh: Mesh | None,
    evaluated: Sequence[QuestionSet] = (),
    verifiers: Mapping[str, str] | None = None,
    prompts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What made a state, for JSON.

    `verifiers`: digests of files that grade, by the key and the value that name each. `prompts`:
    `Environment.prompt_fingerprints`.
    """
    return {
        "seed": config.seed,
        "config": json.loads(json.dumps(config_io.flatten(config))),
        "config_fingerprint": config_io.fingerprint(config),
        "data_fingerprint": data_fingerprint(questions),
        "evaluated_fingerprints": {one.name: data_fingerprint(one) for one in evaluated},
        "verifier_fingerprints": dict(verifiers or {}),
        "prompt_fingerprints": dict(prompts or {}),
        "versions": {name: version(name) for name in VERSIONED},
        "mesh": {} if mesh is None else {name: int(size) for name, size in mesh.shape.items()},
        "devices": [jax.device_count(), jax.devices()[0].device_kind],
    }


def check_same_questions(
    then: Mapping[str, Any], now: Mapping[str, Any], config: Config, run: Path
) -> None:
    """UserError if a checkpoint's provenance (`then`) has other questions or another verifier."""
    advice = "restore the file, or write another output.dir"
    if then["data_fingerprint"] != now["data_fingerprint"]:
        raise UserError(
            f"data.train={written(config.data.train)}: its questions are not those that the run in "
            f"{run} was trained on; {advice}"
        )
    before, here = then["evaluated_fingerprints"], now["evaluated_fingerprints"]
    for name in sorted({*before, *here}):
        if before.get(name) != here.get(name):
            raise UserError(
                f"data.eval: {name} is not the same questions as when the run in {run} was "
                f"evaluated before; {advice} (evaluate --run asks a finished run other questions)"
            )
    # Another file is another value of its key, which --allow-change has let through. Before there
    # were several rewards, a checkpoint held the digest of the grader's file alone.
    alone = {f"grader={then['config'].get('grader')}": then.get("verifier_fingerprint")}
    graded = then.get("verifier_fingerprints", alone)
    for name, digest in now["verifier_fingerprints"].items():
        if graded.get(name, digest) != digest:
            raise UserError(
                f"{name}: the file is not what the run in {run} was graded by; put it back, write "
                "another output.dir, or give the new one another name and --allow-change "
                f"{name.partition('=')[0]}"
            )


# Keys that change prompts and are changed on purpose, by --allow-change.
_PROMPT_KEYS = (
    *("data.prompt_format", "data.system_prompt", "data.template_variables", "data.prompt_date"),
    *("data.closing_text", "data.max_prompt_tokens", "conditioning.told", "conditioning.words"),
    *("budget.max", "eval.budgets", "method"),
)


def check_same_prompts(
    then: Mapping[str, Any], now: Mapping[str, str], config: Config, run: Path
) -> None:
    """Refuses to use a checkpoint with another tokenizer, chat template or other prompts.

    Checkpoints that were saved without digests of their prompts are not compared.

    Args:
      then: provenance of the checkpoint.
      now: digests of `Environment.prompt_fingerprints`, or some of them.
      config: settings under which `now` was made.

    Raises:
      UserError: says which of them is not what the run was trained with.
    """
    before = then.get("prompt_fingerprints")
    if not before:
        return
    settings = json.loads(json.dumps(config_io.flatten(config)))
    changed = any(then["config"].get(key) != settings[key] for key in _PROMPT_KEYS)
    key = "model.tokenizer" if config.model.tokenizer else "model.path"
    folder = f"{key}={config.model.tokenizer or config.model.path}"
    advice = "put the files back, or write another output.dir"
    for name, digest in now.items():
        if before.get(name, digest) == digest:
            continue
        if name == "tokenizer":
            raise UserError(
                f"{folder}: its tokenizer has another vocabulary than the run in {run} was trained "
                f"with; {advice}"
            )
        if changed:
            continue
        if name == "template":
            raise UserError(
                f"{folder}: its chat template writes other prompts, or ends turns with other "
                f"tokens, than when the run in {run} was trained; {advice}"
            )
        raise UserError(
            f"{folder}: the prompts of {name} have other tokens than when the run in {run} was "
            f"trained; {advice}"
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that keeps a resumed run from being bit for bit the same."""
    if "prompt_fingerprints" not in then:
        yield (
            "note: the checkpoint has no digest of its prompts, so template and tokenizer were "
            "not compared with those that the run began with"
        )
    for what in ("versions", "devices", "mesh"):
        if then[what] != now[what]:
            yield (
                f"note: {what} were {then[what]} and are {now[what]}: the run goes on, but not bit "
                "for bit as it would have"
            )
