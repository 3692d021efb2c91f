"""Everything around Algorithm 1 that a run needs: start or resume, evaluate, log, save, report."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax

from bacr_jax.config import Config, derived
from bacr_jax.config.derived import HOLDOUT, selection_set
from bacr_jax.documents import append_line, read_lines, write_json
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decline import Decline, declines
from bacr_jax.evaluation.decoder import Decoder, evaluate_set
from bacr_jax.evaluation.selection import Candidate, choose, make_candidate, to_record
from bacr_jax.evaluation.summary import Summary
from bacr_jax.methods.published import departures
from bacr_jax.methods.registry import advice
from bacr_jax.oom import phase_memory
from bacr_jax.parallel import host_memory, processes
from bacr_jax.parallel.compile_cache import keep_programs
from bacr_jax.parallel.peers import TellPhase
from bacr_jax.prompts.environment import Questions
from bacr_jax.report import table
from bacr_jax.report.chosen_step import best_note
from bacr_jax.runs import history, setup
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.digest import DigestMismatch, check_replicas, digests, fingerprint, verify
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.health import FAILING_STEPS, RunHealth, VerifierWatch, all_failed
from bacr_jax.runs.metrics import MetricsWriter
from bacr_jax.runs.progress import Phase, Progress, duration
from bacr_jax.runs.provenance import (
    check_same_prompts,
    check_same_questions,
    differences,
    provenance,
)
from bacr_jax.runs.restarts import give_up_reason
from bacr_jax.runs.setup import make_policy
from bacr_jax.training import stages
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.output import evaluation_notes, evaluation_numbers, publish, write_traces
from bacr_jax.training.run import RunState, make_run, precompile, total_steps
from bacr_jax.training.served import largest_mismatch, with_servers
from bacr_jax.training.start import (
    after_rejection_sft,
    initial_state,
    open_inputs_together,
    restore_files,
    untrained_state,
)
from bacr_jax.training.undo import make_guard
from bacr_jax.training.warmup_folder import check_warmup
from bacr_jax.types import Poll

# Evaluations that a run makes once; those in between are told apart by their step.
FRAME = ("before", "after")
# Digests kept with every checkpoint: of all that the run began with, and of its frozen base.
_ORIGIN = ("start_fingerprint", "base_fingerprint")


class TrainingFailed(Exception):
    """Going on would be no use; the message says what went wrong and what to do."""


class VerifierFailed(UserError):
    """A verifier gives no answer a score, so that training would only spoil the policy."""


class Trainer:
    """A run in progress; `train.train` reads as its table of contents."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        poll: Poll = None,
        tell_phase: TellPhase | None = None,
    ):
        """Builds data, model settings and the iteration; trains nothing yet."""
        self.config, self.folder, self.poll = config, folder, poll or (lambda: None)
        self.tell_phase = tell_phase or (lambda phase, step: None)
        self.started, self.earlier_seconds = time.monotonic(), 0.0
        # Digests of what the run began with.
        self.origin: dict[str, str] = {}
        # Seconds that the run took, where its summary says that it was finished before.
        self.took: float | None = None
        self.writes = processes.is_first()
        self.progress = Progress(enabled=self.writes)
        host_memory.keep_freed_memory()
        kept = keep_programs(config.output.compile_cache)
        self.method, self.environment = open_inputs_together(config)
        check_warmup(config, folder)
        self.departures = departures(config, self.method)
        vocab_size = self.environment.vocab_size
        shape = setup.model_shape(config, vocab_size)
        mesh = setup.mesh_shape(config, shape, jax.device_count())
        self.policy = make_policy(config, self.method, vocab_size, mesh)
        count = len(self.departures)
        where = f", {count} settings unlike its publication (--check lists them)" if count else ""
        self.progress.say(f"method {self.method.name}{where}")
        if host_memory.lacks_huge_pages(shape.num_parameters):
            pages = f"{host_memory.TUNABLES}={host_memory.HUGE_PAGES}"
            self.progress.say(f"faster on this CPU with {pages} in its environment")
        for line in advice(config):
            self.progress.say(f"  {line}")
        for line in (*self.environment.describe_data(config.eval.size), kept.line):
            self.progress.say(line)
        self.steps = total_steps(config, len(self.environment.train))
        run = make_run(config, self.environment, self.method, self.policy, self.steps)
        self.run = with_servers(run, folder.path, self.progress.say)
        self.reference: Any = None
        self.metrics = MetricsWriter(folder, config, writes=self.writes)
        self.checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)
        self.history = history.History(folder)
        self.evaluations: dict[str, dict[str, Summary]] = {}
        self.evaluated: list[dict[str, Any]] = []
        self.selected = selection_set(config)
        # Evaluated checkpoints that are on the disk, and the best of them.
        self.candidates: list[Candidate] = []
        self.best: Candidate | None = None
        self.health = RunHealth(largest_mismatch(config))
        self.guard = make_guard(config.train)
        self.verifier_watch = VerifierWatch()
        self.failing_verifiers: list[str] = []
        self.step_metrics: dict[str, float] = {}
        self.phase = Phase(self.progress, "training", self.steps)

    # Start ------------------------------------------------------------------------------------

    @phase_memory("start")
    def start(self) -> tuple[RunState, int]:
        """The state to go on from: the newest checkpoint, or a fresh one after the warm-up."""
        self._refuse_endless_restarts()
        if self.checkpoints.latest is None:
            self.run, fresh = initial_state(self.run, self.folder, self.progress, self.poll)
            self._refer_to(fresh)
            if self.writes:
                self.folder.truncate_after(-1)
            return after_rejection_sft(self.run, fresh, self.progress, self.poll), 0
        meta = self.checkpoints.meta(self.checkpoints.latest)
        now = self.describe(meta["step"])
        check_same_questions(meta, now, self.config, self.folder.path)
        check_same_prompts(meta, now["prompt_fingerprints"], self.config, self.folder.path)
        for line in differences(meta, now):
            self.progress.say(line)
        step, self.earlier_seconds = meta["step"], meta["wall_seconds"]
        self.origin = {name: meta[name] for name in _ORIGIN if meta.get(name)}
        if self.config.loss.kl_coef > 0 or self.policy.adapter is not None:
            self.run, like = initial_state(self.run, self.folder, self.progress, self.poll)
            self._refer_to(like)
        else:
            like = untrained_state(self.run)
        _, state, _ = self.checkpoints.restore(like, step)
        restore_files(self.folder, meta["history"], step, self.progress)
        records = []
        if self.writes:
            if not self.finished(state, step):
                # A longer run than it was: what was its end is none any more.
                self.folder.forget_last_evaluation()
                self.folder.summary.unlink(missing_ok=True)
            records = read_lines(self.folder.evaluations)
            for metrics in read_lines(self.folder.metrics):
                # Their warnings were given before the stop.
                list(self.health.warnings(metrics))
        there = self.checkpoints.steps
        for record in json.loads(processes.text_from_first(json.dumps(records))):
            self._note_evaluation(record, kept=record["step"] in there)
        self._keep_best()
        if self.writes and "after" in self.evaluations:
            self.took = history.recorded_seconds(self.folder, step)
        self.progress.say(f"resumed {self.folder.path} at step {step}")
        return state, step

    def _refuse_endless_restarts(self) -> None:
        """Stops a job that Slurm restarts again and again without anything being saved."""
        reason = ""
        if self.writes:
            warmup = Path(self.config.warmup.dir or self.folder.warmup)
            reason = give_up_reason(self.folder, warmup, os.environ)
        if reason := processes.text_from_first(reason):
            raise TrainingFailed(reason)

    def _refer_to(self, start: RunState) -> None:
        """Keeps what the run began with: as the reference of a KL term, or its digest alone.

        A frozen base is the reference's own: only what is trained is copied.
        """
        parts = (self.run.params(start.train), self.run.frozen)
        found = {name: fingerprint(part) for name, part in zip(_ORIGIN, parts) if part}
        if self.origin not in ({}, found):
            raise UserError(
                f"{self.config.model.path or self.config.warmup.dir or self.folder.warmup}: holds "
                "other weights than those that the run began with and still needs; put them back, "
                "or write another output.dir"
            )
        self.origin = found
        if self.config.loss.kl_coef > 0:
            self.reference = jax.tree.map(lambda x: x.copy(), start.train.policy) | self.run.frozen

    def _note_evaluation(self, record: dict[str, Any], *, kept: bool = True) -> None:
        """Adds an evaluation, and chooses the best checkpoint anew if this one's is `kept`."""
        self.evaluated.append(record)
        if record["when"] in FRAME:
            self.evaluations[record["when"]] = record["sets"]
        if record["when"] == "before" or not kept:
            return
        before = self.evaluations.get("before", {})
        self.candidates.append(make_candidate(record, before, self.selected))
        best = choose(self.candidates)
        assert best is not None
        if self.best is None or best.step != self.best.step:
            self.checkpoints.prefer(best.step)
        self.best = best

    @property
    def best_record(self) -> dict[str, Any] | None:
        """Content of best.json; None if no checkpoint was evaluated."""
        return None if self.best is None else to_record(self.best, self.selected)

    def describe(self, step: int) -> dict[str, Any]:
        """What is kept beside the state of a checkpoint."""
        mesh, questions = self.policy.learner.mesh, self.environment.train.set
        evaluated = [questions.set for questions in self.environment.eval.values()]
        verifiers = self.environment.verifier_digests
        prompts = self.environment.prompt_fingerprints
        return {
            "step": step,
            "best": self.best_record,
            "wall_seconds": self.wall_seconds,
            **self.origin,
            **provenance(self.config, questions, mesh, evaluated, verifiers, prompts),
        }

    @property
    def wall_seconds(self) -> float:
        """Time of all legs of the run, but for work that a kill has lost."""
        return self.earlier_seconds + time.monotonic() - self.started

    @contextlib.contextmanager
    def training(self, state: RunState, step: int) -> Iterator[None]:
        """Shows the loop's progress; everything the rollout can need is compiled first."""
        if self.finished(state, step):
            yield
            return
        self.tell_phase("compile", step)
        compiling: dict[str, Phase] = {}

        def tell(what: str, done: int, total: int) -> None:
            self.poll()
            if what not in compiling:
                compiling[what] = Phase(self.progress, f"compiling {what}", total)
            compiling[what].update(done)

        precompile(self.run, state, self.reference, tell)
        first = "compiling the update in the first step"
        with self.progress.phase("training", self.steps, first) as self.phase:
            yield

    # The loop ---------------------------------------------------------------------------------

    def finished(self, state: RunState, step: int) -> bool:
        """All steps done, or the token allowance used up."""
        return step >= self.expected_steps(state, step)

    def expected_steps(self, state: RunState, step: int) -> int:
        """Steps in all: those of the config, or fewer at the pace that uses up the allowance."""
        most = self.config.train.max_generated_tokens
        if most is None or step == 0:
            return self.steps
        used = max(int(state.generated_tokens), 1)
        return min(self.steps, -(-step * most // used))

    def iterate(self, state: RunState, step: int) -> RunState:
        """One iteration of Algorithm 1, logged."""
        shown = self.environment.shown_to_verifiers()
        with phase_memory("training step", step=step + 1):
            state, done = iterate(
                self.run,
                state,
                step,
                reference=self.reference,
                poll=self.poll,
                tell_phase=self.tell_phase,
                guard=self.guard,
            )
        metrics = self.step_metrics = done.metrics
        if self.writes and (step + 1) % self.config.output.log_every == 0:
            self.metrics.write(step + 1, metrics)
            write_traces(self.folder.traces_of(step + 1), step + 1, self.run, done)
        cuts = [v for k, v in sorted(metrics.items()) if k.startswith("reward/cut_")]
        self.phase.update(
            step + 1,
            total=self.expected_steps(state, step + 1),
            reward=metrics["reward/mean"],
            by_cut="/".join(f"{value:.2f}" for value in cuts),
            thinking=metrics["rollout/thinking_mean"],
            tokens_per_s=metrics["time/tokens_per_s"],
        )
        for warning in (*done.notes, *self.health.warnings(metrics)):
            self.progress.say(f"WARNING, step {step + 1}: {warning}")
        now = self.environment.shown_to_verifiers()
        self.failing_verifiers = self.verifier_watch.after_step(shown, now)
        return state

    def maintain(self, state: RunState, step: int) -> None:
        """Evaluation and checkpoint on their own cadences, and a look at whether to go on."""
        self.poll()
        self.checkpoints.confirm()
        self._check_head(state, step)
        if self.failing_verifiers:
            answers = f"of {FAILING_STEPS} steps in a row"
            self._refuse_verifier(state, step, self.failing_verifiers[0], answers)
        if step == 0 or self.finished(state, step):
            return
        due = lambda every: every is not None and step % every == 0
        if due(self.config.eval.every):
            self.evaluate(state, step, "during")
        improved = self.best is not None and self.best.step == step
        # The first is made at once: whether it can be read is known before much is lost.
        if step == 1 or due(self.config.checkpoint.every) or improved:
            self.save(state, step)
        most = self.config.train.max_skipped_updates
        skipped = int(state.train.skipped_in_a_row)
        # A run that goes on with another rate or rewards has its first step to show.
        if most is not None and skipped >= most and self.step_metrics:
            self.save(state, step)
            self.checkpoints.close()
            raise TrainingFailed(
                f"training: stopped after step {step}, since the loss or its gradient was not "
                f"finite in {skipped} updates in a row; parameters are those before "
                f"them, in {self.folder.checkpoints / str(self.checkpoints.latest)}. Write a lower "
                "optimizer.learning_rate or model.compute_dtype=float32, or look at the rewards"
            )

    def _check_head(self, state: RunState, step: int) -> None:
        """Stops a run whose value head is broken: every advantage after it would be no number."""
        if stages.all_finite((state.train.head, state.train.head_opt)):
            return
        self.checkpoints.close()
        raise TrainingFailed(
            f"training: stopped after step {step}, since the value head or its optimizer holds "
            "numbers that are not finite; nothing of that was saved. Write a lower "
            "value.learning_rate (or optimizer.learning_rate with optimizer.single_rate), and the "
            f"same command goes on from checkpoint {self.checkpoints.latest or 0} in "
            f"{self.folder.checkpoints}; --allow-change names the key"
        )

    def _refuse_verifier(self, state: RunState, step: int, named: str, answers: str) -> NoReturn:
        """Stops a run whose verifier fails on all answers, with a checkpoint."""
        words = self.environment.last_failure(named)
        self.leave(state, step)
        raise VerifierFailed(
            f"{named}: gave no score to any of the answers {answers} (the last: {words}); fix it, "
            "with 0 for answers that it can't read, and write another output.dir, or, if it needs "
            f"no change, the same command goes on from checkpoint {step} in "
            f"{self.folder.checkpoints}"
        )

    def save(self, state: RunState, step: int) -> None:
        """A checkpoint of everything, unless this step has one; copies that differ stop the run."""
        if self.checkpoints.latest != step:
            self.tell_phase("save", step)
            with self._drifting(step):
                check_replicas({"state": state, "base": self.run.frozen})
            meta = self.describe(step)
            if self.writes:
                meta["history"] = self.history.now(self.evaluated)
            self.checkpoints.save(step, state, meta)

    @contextlib.contextmanager
    def _drifting(self, step: int) -> Iterator[None]:
        """Stops a run whose devices hold something else than they were given."""
        try:
            yield
        except DigestMismatch as error:
            raise TrainingFailed(
                f"training: stopped after step {step}, since a device or its memory is at fault "
                f"({error}); nothing was saved. On other devices the same command goes on from "
                f"checkpoint {self.checkpoints.latest or 0}"
            ) from None

    def leave(self, state: RunState, step: int, *, finished: bool = False) -> None:
        """A last checkpoint, whole on disk, before the process ends; a finished run still logs."""
        self.save(state, step)
        self.checkpoints.close()
        self.environment.close()
        if not finished:
            self.metrics.close()

    # Evaluation and report --------------------------------------------------------------------

    def evaluated_sets(self, when: str) -> dict[str, Questions]:
        """Returns sets by name: those of data.eval, and held-out training questions if they select.

        Evaluations between the first and the last may look at the selection set only.
        """
        own = {HOLDOUT: self.environment.holdout} if self.selected == HOLDOUT else {}
        sets = self.environment.eval | own
        if when in FRAME or self.config.eval.during == "all" or self.selected is None:
            return sets
        return {self.selected: sets[self.selected]}

    def evaluate(self, state: RunState, step: int, when: str) -> None:
        """Accuracy by budget on every evaluated set, appended to eval.jsonl."""
        made = {(r["when"], r["step"]) for r in self.evaluated}
        if when in self.evaluations or (when, step) in made:
            return
        self.tell_phase("evaluation", step)
        params, counted = self.run.params(state.train), self.environment.grader.counters()
        counts = self.environment.shown_to_verifiers()
        decoder = Decoder(
            self.policy.decode_params(params),
            self.policy.evaluation,
            self.policy.phi_of(params),
            derived.cap(self.config),
        )
        found = {}
        first = "" if self.evaluated else "compiling"
        for name, questions in self.evaluated_sets(when).items():
            config = self.config.eval
            if name == HOLDOUT:
                # All of them, as a subset would depend on the seed; greedily, as it chooses.
                config = dataclasses.replace(config, size=None, samples=0)
            with (
                self.progress.phase(f"evaluation {when}, {name}", 1, first) as phase,
                phase_memory("evaluation", problems=len(questions)),
            ):
                found[name] = evaluate_set(
                    decoder,
                    self.environment.graded_like(questions),
                    questions,
                    jax.random.fold_in(jax.random.key(self.config.seed), 4),
                    config=config,
                    seed=self.config.seed,
                    spec=name,
                    on_progress=lambda done, total: phase.update(done, total=total),
                    poll=self.poll,
                )
        with self._drifting(step):
            check_replicas(decoder.params)
            used = digests(decoder.params)
            del decoder  # Two copies at once might not fit.
            verify(self.policy.decode_params(params), used)
        if not self.evaluated:
            # Not recorded: the run that goes on evaluates again.
            after = self.environment.shown_to_verifiers()
            for named, failed in all_failed(counts, after).items():
                if failed:
                    self._refuse_verifier(state, step, named, "of the first evaluation")
        sets = {name: result["by_budget"] for name, result in found.items()}
        record = {"step": step, "when": when, "sets": sets}
        dense = () if self.config.eval.dense is None else ("dense",)
        for part in ("anytime", "near_duplicates", *dense):
            record[part] = {name: result[part] for name, result in found.items()}
        if self.writes:
            append_line(self.folder.evaluations, record)
            self.metrics.show(step, "numbers", evaluation_numbers(sets))
        self._note_evaluation(record)
        self._keep_best()
        for line in evaluation_notes(self.config, self.environment.failures(counted), record):
            self.progress.say(line)
        if when not in FRAME:
            for name, summary in sets.items():
                shown = table.set_title(name)
                self.progress.say(f"step {step}, {shown}: {table.in_one_line(summary)}")
                self._warn_of_declines(name, summary, step)

    def _warn_of_declines(self, name: str, summary: Summary, step: int) -> None:
        """Warns of budgets that are worse than before training, if that was evaluated."""
        before = self.evaluations.get("before", {}).get(name, {})
        if worse := list(declines(before, summary)):
            self.progress.say(
                f"WARNING, step {step}: worse than before training on {table.set_title(name)}: "
                f"{table.decline_text(worse)}"
            )

    def _keep_best(self) -> None:
        """Writes best.json, or removes it if no evaluated checkpoint is left."""
        if self.writes and self.best is None:
            self.folder.best.unlink(missing_ok=True)
        elif self.writes:
            write_json(self.folder.best, self.best_record)

    def finish(self, state: RunState, step: int) -> dict[str, Any]:
        """Last checkpoint, summary.json, pictures, and the table on the terminal."""
        self.leave(state, step, finished=True)
        first = next(iter(self.environment.eval))
        seconds = self.took or self.wall_seconds
        worse = self._declines_by_set()
        summary = {
            "method": self.method.name,
            "departures": self.departures,
            "seed": self.config.seed,
            "steps": step,
            "wall_seconds": seconds,
            "generated_tokens": int(state.generated_tokens),
            "best": self.best_record,
            "declines": {
                name: [decline._asdict() for decline in of_set] for name, of_set in worse.items()
            },
            "eval": {when: sets[first] for when, sets in self.evaluations.items()},
            "sets": self.evaluations,
        }
        if not self.writes:
            return summary
        write_json(self.folder.summary, summary)
        for name, questions in self.evaluated_sets("after").items():
            policies = {
                "before": self.evaluations["before"][name],
                self.method.name: self.evaluations["after"][name],
            }
            title = "accuracy by thinking budget, 95 % intervals"
            for which, found in table.with_and_without(table.set_title(name), policies):
                self.progress.say(table.comparison_table(f"{which}: {title}", found))
            if questions.set.note:
                self.progress.say(questions.set.note)
        publish(self.folder, self.config, self.metrics, step, again=self.took is not None)
        self.progress.say(
            f"{step} steps, {int(state.generated_tokens):,} generated tokens, "
            f"{duration(seconds)}; everything is in {self.folder.path}"
        )
        for name, of_set in worse.items():
            if of_set:
                self.progress.say(
                    f"WARNING, worse than before training on {table.set_title(name)}: "
                    f"{table.decline_text(of_set)}"
                )
        if any(worse.values()) or (self.best is not None and self.best.step != step):
            self.progress.say(best_note(self.best_record))
        return summary

    def _declines_by_set(self) -> dict[str, list[Decline]]:
        """Returns what is worse than before training, by evaluation set."""
        before, after = self.evaluations["before"], self.evaluations["after"]
        return {name: list(declines(before[name], after[name])) for name in after}
