"""Everything around Algorithm 1 that a run needs: start or resume, evaluate, log, save, report."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_jax import policy as policies
from bacr_jax.checkpoint import Checkpoints
from bacr_jax.config import Config
from bacr_jax.data import ledger
from bacr_jax.environment import build_environment
from bacr_jax.errors import UserError
from bacr_jax.evaluation.by_budget import Summary, evaluate_by_budget
from bacr_jax.iteration import Iteration, RunState
from bacr_jax.methods import load_method
from bacr_jax.metrics import MetricsWriter
from bacr_jax.parallel import processes
from bacr_jax.policy import make_policy
from bacr_jax.progress import Phase, Progress, duration
from bacr_jax.report import plots, tables
from bacr_jax.rollout.generate import Rollout
from bacr_jax.run_folder import RunFolder, append_line, read_lines, write_json
from bacr_jax.text.extraction import decode_ids
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG
from bacr_jax.warmup import warm_up

CLOSE_NAMES = {CLOSED_BY_BUDGET: "budget", CLOSED_BY_TAG: "tag", CLOSED_BY_EOS: "end of turn"}


class Trainer:
    """A run in progress; `train.train` reads as its table of contents."""

    def __init__(self, config: Config, folder: RunFolder):
        """Builds data, model settings and the iteration; trains nothing yet."""
        self.config, self.folder = config, folder
        self.writes = processes.is_first()
        self.progress = Progress(enabled=self.writes)
        self.method = load_method(config)
        tokenizer, vocab_size = _tokenizer(config)
        shape = policies.model_shape(config, vocab_size)
        mesh = policies.mesh_shape(config, shape, jax.device_count())
        self.policy = make_policy(config, self.method, vocab_size, mesh)
        self.environment = build_environment(config, tokenizer, vocab_size)
        self.steps = self._total_steps()
        self.iteration = Iteration(config, self.environment, self.method, self.policy, self.steps)
        self.metrics = MetricsWriter(folder, tensorboard=config.output.tensorboard)
        self.checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)
        self.evaluations: dict[str, dict[str, Summary]] = {}
        self.phase = Phase(self.progress, "training", self.steps)

    def _total_steps(self) -> int:
        train = self.config.train
        if train.steps is not None:
            return train.steps
        draws = train.epochs * len(self.environment.train)
        return math.ceil(draws / self.config.rollout.questions)

    # Start ------------------------------------------------------------------------------------

    def start(self) -> tuple[RunState, int]:
        """The state to go on from: the newest checkpoint, or a fresh one after the warm-up."""
        fresh = self.iteration.init_state(self._initial_params(), self._initial_head())
        self._keep_reference(fresh)
        if self.checkpoints.latest is None:
            if self.writes:
                self.folder.truncate_after(-1)
            return fresh, 0
        step, state, _ = self.checkpoints.restore(fresh)
        records = []
        if self.writes:
            self.folder.truncate_after(step)
            records = read_lines(self.folder.evaluations)
        for record in json.loads(processes.text_from_first(json.dumps(records))):
            self.evaluations[record["when"]] = record["sets"]
        self.progress.say(f"resumed {self.folder.path} at step {step}")
        return state, step

    def _keep_reference(self, state: RunState) -> None:
        if self.config.loss.kl_coef > 0:
            self.iteration.reference = jax.tree.map(lambda x: x.copy(), state.train.policy)

    def _initial_params(self) -> Any:
        config = self.config
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        if config.warmup.steps == 0:
            return policies.initial_params(key, self.policy, config.model.path)
        folder = Path(config.warmup.dir) if config.warmup.dir else self.folder.path / "warmup"
        largest = max(config.eval.budgets)
        check = dataclasses.replace(config.eval, budgets=(largest,), samples=0, size=256)
        name, questions = next(iter(self.environment.eval.items()))
        spec = dataclasses.replace(self.policy.evaluation, conditioning=None)

        def accuracy_of(params: Any) -> float:
            summary = evaluate_by_budget(
                self.policy.plain_decode_params(params),
                self.environment,
                questions,
                key,
                config=check,
                spec=spec,
                seed=config.seed,
                phi_of=None,
            )
            return float(summary["greedy"][str(largest)]["accuracy"])

        with self.progress.phase("warm-up", config.warmup.steps) as phase:
            params = warm_up(
                config,
                self.policy,
                folder,
                accuracy_of=accuracy_of,
                on_progress=lambda step, total, loss: phase.update(step, total=total, loss=loss),
            )
        return policies.with_budget_module(key, self.policy, params)

    def _initial_head(self) -> Any:
        key = jax.random.fold_in(jax.random.key(self.config.seed), 3)
        return policies.random_head(key, self.policy)

    @contextlib.contextmanager
    def training(self, state: RunState, step: int) -> Iterator[None]:
        """Shows the loop's progress; everything the rollout can need is compiled first."""
        if self.finished(state, step):
            yield
            return
        with self.progress.phase("training", self.steps) as self.phase:
            self.iteration.precompile(state)
            yield

    # The loop ---------------------------------------------------------------------------------

    def finished(self, state: RunState, step: int) -> bool:
        """All steps done, or the token allowance used up."""
        most = self.config.train.max_generated_tokens
        spent = most is not None and int(state.generated_tokens) >= most
        return step >= self.steps or spent

    def iterate(self, state: RunState, step: int) -> RunState:
        """One iteration of Algorithm 1, logged."""
        state, metrics, rollout, outcomes = self.iteration.iterate(state, step)
        if self.writes and (step + 1) % self.config.output.log_every == 0:
            self.metrics.write(step + 1, metrics)
            self._write_rollouts(step + 1, rollout, outcomes)
        cuts = [v for k, v in sorted(metrics.items()) if k.startswith("reward/cut_")]
        self.phase.update(
            step + 1,
            reward=metrics["reward/mean"],
            by_cut="/".join(f"{value:.2f}" for value in cuts),
            thinking=metrics["rollout/thinking_mean"],
            tokens_per_s=metrics["time/tokens_per_s"],
        )
        return state

    def maintain(self, state: RunState, step: int) -> None:
        """Evaluation and checkpoint on their own cadences."""
        every = self.config.eval.every
        if every is not None and step % every == 0 and not self.finished(state, step):
            self.evaluate(state, step, "during")
        every = self.config.checkpoint.every
        if every is not None and step % every == 0 and not self.finished(state, step):
            self.save(state, step)

    def save(self, state: RunState, step: int) -> None:
        """A checkpoint of everything."""
        self.checkpoints.save(step, state, {"step": step, "seed": self.config.seed})

    # Evaluation and report --------------------------------------------------------------------

    def evaluate(self, state: RunState, step: int, when: str) -> None:
        """Accuracy by budget on every evaluation set, appended to eval.jsonl."""
        if when in self.evaluations:
            return
        params = state.train.policy
        decode = self.policy.decode_params(params)
        found = {}
        for name, questions in self.environment.eval.items():
            with self.progress.phase(f"evaluation {when}, {name}", 1) as phase:
                found[name] = evaluate_by_budget(
                    decode,
                    self.environment,
                    questions,
                    jax.random.fold_in(jax.random.key(self.config.seed), 4),
                    config=self.config.eval,
                    spec=self.policy.evaluation,
                    seed=self.config.seed,
                    phi_of=self.policy.phi_of(params),
                    on_progress=lambda done, total: phase.update(done, total=total),
                )
        if self.writes:
            append_line(self.folder.evaluations, {"step": step, "when": when, "sets": found})
        if when in ("before", "after"):
            self.evaluations[when] = found

    def finish(self, state: RunState, step: int, wall_seconds: float) -> dict[str, Any]:
        """Last checkpoint, summary.json, pictures, and the table on the terminal."""
        if self.checkpoints.latest != step:
            self.save(state, step)
        self.checkpoints.close()
        self.metrics.close()
        self.environment.grader.close()
        first = next(iter(self.environment.eval))
        summary = {
            "method": self.method.name,
            "seed": self.config.seed,
            "steps": step,
            "wall_seconds": wall_seconds,
            "generated_tokens": int(state.generated_tokens),
            "eval": {when: sets[first] for when, sets in self.evaluations.items()},
            "sets": self.evaluations,
        }
        if not self.writes:
            return summary
        write_json(self.folder.summary, summary)
        records = read_lines(self.folder.metrics)
        if records:
            plots.training_curves(
                self.folder.path / "training.png", records, f"{self.method.name}, training"
            )
        for name in self.environment.eval:
            policies = {
                "before": self.evaluations["before"][name],
                self.method.name: self.evaluations["after"][name],
            }
            title = f"{name}: accuracy by thinking budget, 95 % intervals"
            picture = self.folder.path / f"accuracy_{Path(name.partition(':')[0]).name}.png"
            plots.accuracy_by_budget(picture, policies, title)
            self.progress.say(tables.comparison_table(title, policies))
        self.progress.say(
            f"{step} steps, {int(state.generated_tokens):,} generated tokens, "
            f"{duration(wall_seconds)}; everything is in {self.folder.path}"
        )
        return summary

    def _write_rollouts(self, step: int, rollout: Rollout, outcomes: np.ndarray) -> None:
        """A few traces as text: question, budget, thinking, cuts, answers, outcomes."""
        path = self.folder.rollouts / f"{step:06d}.jsonl"
        path.unlink(missing_ok=True)
        decode = lambda ids: decode_ids(self.environment.tokenizer, ids.tolist())
        trunks, branches = rollout.trunks, rollout.branches
        texts = self.environment.answer_texts(branches)
        flat = outcomes.reshape(-1, outcomes.shape[-1])
        chosen = np.linspace(0, len(flat) - 1, min(self.config.output.rollouts, len(flat)))
        for row in chosen.astype(int):
            start = int(trunks.prompt_lengths[row])
            end = start + int(trunks.sampled[row])
            append_line(
                path,
                {
                    "step": step,
                    "row": int(row),
                    "prompt": decode(trunks.tokens[row, :start]),
                    "budget": int(trunks.budgets[row]),
                    "thinking": decode(trunks.tokens[row, start:end]),
                    "thinking_tokens": int(trunks.thinking[row]),
                    "closed_by": CLOSE_NAMES[int(trunks.close[row])],
                    "context": [int(c) - start for c in branches.context[row]],
                    "answers": texts[row],
                    "outcomes": [float(r) for r in flat[row]],
                },
            )


def _tokenizer(config: Config) -> tuple[Any, int]:
    """The tokenizer of a run and the number of embedding rows its model needs."""
    if config.data.train == "ledger":
        own = ledger.ledger_tokenizer()
        return own, len(own)
    from transformers import AutoTokenizer

    folder = config.model.tokenizer or config.model.path
    if folder is None or not Path(folder).is_dir():
        raise UserError(f"model.tokenizer: no folder {folder!r}; write a Hugging Face folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, policies.vocabulary_rows(config, len(tokenizer))
