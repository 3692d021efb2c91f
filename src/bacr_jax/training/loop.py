"""Contains the trainer, which executes a training run from start to finish.

`session.train` calls the methods of `Trainer` in order: start or resume, evaluate, iterate, save,
finish. `algorithm.iterate` implements one iteration.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import HOLDOUT, cap, selection_set
from bacr_jax.config.presets import preset_of
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation.decline import Decline
from bacr_jax.evaluation.decoder import Decoder, evaluate_set
from bacr_jax.files import append_line, read_lines, write_json
from bacr_jax.methods.published import departures
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel import host_memory, processes
from bacr_jax.parallel.compile_cache import keep_programs
from bacr_jax.parallel.peers import OnPhase
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.runs import history, setup
from bacr_jax.runs.checkpoint import Checkpoints, restore_target
from bacr_jax.runs.digest import DigestMismatch, check_replicas, digests, verify
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.health import FAILING_STEPS, RunHealth, VerifierWatch, all_failed
from bacr_jax.runs.metrics import MetricsWriter
from bacr_jax.runs.progress import Phase, Progress, duration
from bacr_jax.runs.provenance import check_same_inputs, differences, provenance
from bacr_jax.runs.setup import make_policy
from bacr_jax.training import failures, initialize, stages
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.evaluations import ENDPOINTS, Evaluations
from bacr_jax.training.limited_updates import LimitedUpdates
from bacr_jax.training.logging import Iteration
from bacr_jax.training.origin import check_origin, recorded_origin
from bacr_jax.training.output import (
    end_lines,
    evaluation_notes,
    evaluation_numbers,
    evaluation_record,
    print_results,
    print_tables,
    publish,
    start_policy,
    write_traces,
)
from bacr_jax.training.run import RunState, make_run, precompile, total_steps
from bacr_jax.training.run_summary import (
    RunFacts,
    devices_text,
    hint_lines,
    next_lines,
    start_lines,
)
from bacr_jax.training.served import largest_mismatch, with_servers
from bacr_jax.training.undo import make_guard, restore_with_snapshot
from bacr_jax.training.warmup_folder import check_warmup, warmup_fingerprint
from bacr_jax.types import Params, Poll

# Folded into the key of the run's seed to get the PRNG key of evaluations.
_EVALUATION_STREAM = 4


class Trainer:
    """Trains, evaluates and saves the policy of a run, and resumes an interrupted run."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        poll: Poll = None,
        on_phase: OnPhase | None = None,
    ):
        """Reads the data and builds everything that training needs, without training.

        Args:
          poll: called wherever the work can be interrupted. It raises an exception to interrupt the
            work.
          on_phase: called with the name and the step of each phase when it begins.
        """
        self.config = config
        self.folder = folder
        self.poll = poll or (lambda: None)
        self.on_phase = on_phase or (lambda phase, step: None)
        self.started = time.monotonic()
        # Wall-clock seconds of this run before it was resumed.
        self.earlier_seconds = 0.0
        # Digests of the weights at the start of the run (`check_origin`).
        self.origin: dict[str, str] = {}
        # Wall-clock seconds of the whole run, from summary.json, if it was already finished.
        self.took: float | None = None
        self.writes = processes.is_first()
        self.progress = Progress(enabled=self.writes)
        host_memory.keep_freed_memory()
        cache = keep_programs(config.output.compile_cache)
        settings = resolve(config)
        values = config_io.flatten(config)
        self.method, self.task_data = initialize.open_inputs_together(settings, values)
        check_warmup(config.warmup, warmup_fingerprint(config), folder)
        self.preset = preset_of(values)
        self.departures = departures(settings.method, self.method)
        vocab_size = self.task_data.vocab_size
        shape = setup.model_shape(config.model, vocab_size)
        mesh = setup.mesh_shape(settings.policy, shape, jax.device_count())
        self.policy = make_policy(settings.policy, self.method, vocab_size, mesh)
        facts = RunFacts(config, folder.path, self.method, shape, self.task_data)
        devices = devices_text(config.model.compute_dtype, mesh)
        for line in (*start_lines(facts, devices, self.progress.width), *hint_lines(facts, cache)):
            self.progress.print_line(line)
        self.steps = total_steps(config.train, config.rollout, len(self.task_data.train))
        run = make_run(config, self.task_data, self.method, self.policy, self.steps)
        self.run = with_servers(run, folder.path, self.progress.print_line)
        # Parameters of the reference policy for the KL penalty. None without a KL penalty.
        self.reference: Any = None
        self.metrics = MetricsWriter(folder, config, writes=self.writes)
        self.checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)
        self.run = dataclasses.replace(self.run, before_update=self._free_memory)
        self.history = history.History(folder)
        selected = selection_set(config.eval, config.data)
        self.evaluations = Evaluations(selected, folder, self.checkpoints)
        self.health = RunHealth(
            largest_mismatch(config.model, config.rollout, config.loss, config.train.minibatches)
        )
        self.guard = make_guard(config.train)
        self.limited = LimitedUpdates()
        self.verifier_watch = VerifierWatch()
        self.failing_verifiers: list[str] = []
        self.step_metrics: dict[str, float] = {}
        self.phase = Phase(self.progress, "training", self.steps)

    # Start ------------------------------------------------------------------------------------

    @phase_memory("start")
    def start(self) -> tuple[RunState, int]:
        """Returns the state to start or continue from, and the number of steps already done."""
        if self.checkpoints.latest is not None:
            return self._resume(self.checkpoints.latest)
        self.run, state = initialize.initial_state(self.run, self.folder, self.progress, self.poll)
        self._record_origin(state)
        if self.writes:
            self.folder.truncate_after(-1)
        state = initialize.after_rejection_sft(self.run, state, self.progress, self.poll)
        if self.method.rejection_sft is not None:
            # A run that is stopped later need not repeat this stage, which may take hours.
            self.save(state, 0)
        return state, 0

    def _resume(self, latest: int) -> tuple[RunState, int]:
        """Restores the run from checkpoint `latest`, and returns its state and step."""
        meta = self.checkpoints.meta(latest)
        step = meta["step"]
        description = self.describe(step)
        check_same_inputs(meta, description, config_io.flatten(self.config), self.folder.path)
        for line in differences(meta, description):
            self.progress.print_line(line)
        self.earlier_seconds = meta["wall_seconds"]
        self.limited = LimitedUpdates(**meta["limited_updates"])
        self.origin = recorded_origin(meta)
        if self.config.loss.kl_coef > 0 or self.policy.adapter is not None:
            # Checkpoints contain neither the reference policy nor the frozen base weights.
            self.run, state = initialize.initial_state(
                self.run, self.folder, self.progress, self.poll
            )
            self._record_origin(state)
            like = restore_target(state)
            # Free the initial state, because memory may not suffice for two states.
            del state
        else:
            like = initialize.abstract_state(self.run)
        state = restore_with_snapshot(
            self.checkpoints, like, step, meta.get("before_update"), self.guard
        )
        initialize.restore_files(self.folder, meta["history"], step, self.progress)
        records = []
        if self.writes:
            if not self.finished(state, step):
                # The run was already finished, but the config now has more steps.
                self.folder.forget_last_evaluation()
                self.folder.summary.unlink(missing_ok=True)
            records = read_lines(self.folder.evaluations)
            self.health.resume(meta["health"])
        records = json.loads(processes.text_from_first(json.dumps(records)))
        self.evaluations.restore(records, self.checkpoints.steps)
        if self.writes:
            self.evaluations.write_best()
        if self.writes and "after" in self.evaluations.endpoints:
            self.took = history.recorded_seconds(self.folder, step)
        self.progress.print_line(f"resumed {self.folder.path} at step {step}")
        return state, step

    def _record_origin(self, start: RunState) -> None:
        """Records digests of the initial weights, and stores the reference policy of a KL penalty.

        The reference policy copies the trained weights, and shares the frozen base weights.

        Raises:
          UserError: the weights differ from the initial weights of the run that is being resumed.
        """
        self.origin = check_origin(
            resolve(self.config).policy,
            start.train.policy,
            self.run.frozen,
            self.origin,
            self.config.model.path or self.config.warmup.dir or self.folder.warmup,
        )
        if self.config.loss.kl_coef > 0:
            trained = jax.tree.map(lambda x: x.copy(), start.train.policy)
            self.reference = trained | self.run.frozen

    def describe(self, step: int) -> dict[str, Any]:
        """Returns the metadata to store with the checkpoint of a step."""
        origin = provenance(
            config_io.flatten(self.config),
            config_io.fingerprint(self.config),
            self.task_data.train.set,
            self.policy.learner.mesh,
            [questions.set for questions in self.task_data.eval.values()],
            self.task_data.verifier_digests,
            self.task_data.prompt_fingerprints,
            self.method.source_digest,
            self.policy.learner.model,
        )
        return {
            "step": step,
            "best": self.evaluations.best_record,
            "wall_seconds": self.wall_seconds,
            "limited_updates": self.limited._asdict(),
            **self.origin,
            **origin,
        }

    @property
    def wall_seconds(self) -> float:
        """Returns the run's wall-clock seconds, without steps that were lost when it was killed."""
        return self.earlier_seconds + time.monotonic() - self.started

    @contextlib.contextmanager
    def training(self, state: RunState, step: int) -> Iterator[None]:
        """Context manager that compiles the training programs and then shows a progress bar."""
        if self.finished(state, step):
            yield
            return
        self.on_phase("compile", step)
        phases: dict[str, Phase] = {}

        def show(kind: str, done: int, total: int) -> None:
            self.poll()
            if kind not in phases:
                phases[kind] = Phase(self.progress, f"compiling {kind}", total)
            phases[kind].update(done)

        precompile(self.run, state, self.reference, show)
        first = "compiling the update in the first step"
        with self.progress.phase("training", self.steps, first) as self.phase:
            yield

    # The loop ---------------------------------------------------------------------------------

    def finished(self, state: RunState, step: int) -> bool:
        """True if all steps are done or `train.max_generated_tokens` has been reached."""
        return step >= self.expected_steps(state, step)

    def expected_steps(self, state: RunState, step: int) -> int:
        """Returns the number of steps after which the run is expected to end.

        The mean number of tokens per step predicts the step that reaches
        train.max_generated_tokens.
        """
        limit = self.config.train.max_generated_tokens
        if limit is None or step == 0:
            return self.steps
        generated = max(int(state.generated_tokens), 1)
        return min(self.steps, -(-step * limit // generated))  # Round up.

    def iterate(self, state: RunState, step: int) -> RunState:
        """Runs one iteration of Algorithm 1 and logs its results."""
        graded_before = self.task_data.shown_to_verifiers()
        with phase_memory("training step", step=step + 1):
            state, done = iterate(
                self.run,
                state,
                step,
                reference=self.reference,
                poll=self.poll,
                on_phase=self.on_phase,
                guard=self.guard,
            )
        host_memory.return_freed_memory()
        self.step_metrics = done.metrics
        self.limited = self.limited.after(done.metrics)
        self._log_iteration(state, step + 1, done)
        graded_after = self.task_data.shown_to_verifiers()
        self.failing_verifiers = self.verifier_watch.after_step(graded_before, graded_after)
        return state

    def _free_memory(self) -> None:
        """Frees the memory that rollouts and the last checkpoint have used, before an update."""
        self.checkpoints.release_large_state()
        host_memory.return_freed_memory()

    def _log_iteration(self, state: RunState, step: int, done: Iteration) -> None:
        """Logs the metrics and traces of a finished step, and prints its progress and warnings."""
        metrics = done.metrics
        if self.writes and step % self.config.output.log_every == 0:
            self.metrics.write(step, metrics)
            write_traces(self.folder.traces_of(step), step, self.run, done)
        accuracies = [metrics[name] for name in sorted(metrics) if name.startswith("reward/cut_")]
        self.phase.update(
            step,
            total=self.expected_steps(state, step),
            reward=metrics["reward/mean"],
            by_cut="/".join(f"{accuracy:.2f}" for accuracy in accuracies),
            thinking=metrics["rollout/thinking_mean"],
            tokens_per_s=metrics["time/tokens_per_s"],
        )
        for warning in (*done.notes, *self.health.warnings(metrics)):
            self.progress.print_line(f"WARNING, step {step}: {warning}")

    def maintain(self, state: RunState, step: int) -> None:
        """Evaluates and saves at the configured steps, and stops a run that can't continue.

        Raises:
          TrainingFailed: the value head is not finite, or too many updates in a row were skipped.
          VerifierFailed: in several consecutive steps, a verifier scored no answer.
        """
        self.poll()
        self.checkpoints.confirm()
        self._check_head(state, step)
        if self.failing_verifiers:
            answers = f"of {FAILING_STEPS} steps in a row"
            self._refuse_verifier(state, step, self.failing_verifiers[0], answers)
        if step == 0 or self.finished(state, step):
            return
        if _is_due(step, self.config.eval.every):
            self.evaluate(state, step, "during")
        best = self.evaluations.best
        is_best = best is not None and best.step == step
        # Always save step 1, so that a folder without write permission is noticed early.
        if step == 1 or is_best or _is_due(step, self.config.checkpoint.every):
            self.save(state, step)
        self._check_skipped_updates(state, step)

    def _check_skipped_updates(self, state: RunState, step: int) -> None:
        """Stops a run if its last `train.max_skipped_updates` updates were all skipped."""
        limit = self.config.train.max_skipped_updates
        skipped = int(state.train.skipped_in_a_row)
        # The count of skipped updates is part of the checkpoint. A run that was resumed, possibly
        # with a lower learning rate, takes at least one step before it can be stopped again.
        if limit is None or skipped < limit or not self.step_metrics:
            return
        self.save(state, step)
        self.checkpoints.close()
        saved = self.folder.checkpoints / str(self.checkpoints.latest)
        raise failures.skipped_updates(step, skipped, saved)

    def _check_head(self, state: RunState, step: int) -> None:
        """Stops a run with a non-finite value head, which would make all advantages non-finite."""
        if stages.all_finite((state.train.head, state.train.head_opt)):
            return
        self.checkpoints.close()
        last_saved = self.checkpoints.latest or 0
        raise failures.head_not_finite(step, last_saved, self.folder.checkpoints)

    def _refuse_verifier(self, state: RunState, step: int, name: str, answers: str) -> NoReturn:
        """Saves a checkpoint, then raises VerifierFailed for a verifier that scored no answer.

        Args:
          name: name of the verifier.
          answers: phrase that describes the answers, such as "of 3 steps in a row".
        """
        last_failure = self.task_data.last_failure(name)
        self.leave(state, step)
        raise failures.verifier_failed(name, answers, last_failure, step, self.folder.checkpoints)

    def save(self, state: RunState, step: int) -> None:
        """Saves a checkpoint of the whole state, unless the step already has a checkpoint.

        Raises:
          TrainingFailed: a replicated array has different values on different devices.
        """
        if self.checkpoints.latest == step:
            return
        self.on_phase("save", step)
        with self._stops_on_mismatch(step):
            check_replicas({"state": state, "base": self.run.frozen})
        meta = self.describe(step)
        if self.writes:
            meta["history"] = self.history.now(self.evaluations.records)
            meta["health"] = self.health.to_record()
        if self.guard is not None:
            state, meta["before_update"] = self.guard.to_save(state)
        self.checkpoints.save(step, state, meta)

    @contextlib.contextmanager
    def _stops_on_mismatch(self, step: int) -> Iterator[None]:
        """Context manager that converts a `DigestMismatch` into a `TrainingFailed`."""
        try:
            yield
        except DigestMismatch as error:
            last_saved = self.checkpoints.latest or 0
            raise failures.device_fault(step, last_saved, error) from None

    def leave(self, state: RunState, step: int, *, finished: bool = False) -> None:
        """Saves the last checkpoint, waits until it is written, and closes the graders.

        Args:
          finished: True to keep the metrics writer open, because the summary is logged later.
        """
        self.save(state, step)
        self.checkpoints.close()
        self.task_data.close()
        if not finished:
            self.metrics.close()

    # Evaluation and report --------------------------------------------------------------------

    def evaluated_sets(self, when: str) -> dict[str, PromptedQuestions]:
        """Returns the question sets to evaluate, by name.

        The held-out training questions are included if they select the best checkpoint. Evaluations
        during training only use the selecting set, unless eval.during is "all".
        """
        sets = dict(self.task_data.eval)
        selected = self.evaluations.selected
        if selected == HOLDOUT:
            sets[HOLDOUT] = self.task_data.holdout
        if when in ENDPOINTS or self.config.eval.during == "all" or selected is None:
            return sets
        return {selected: sets[selected]}

    def evaluate(self, state: RunState, step: int, when: str) -> None:
        """Evaluates the policy on every set and appends a record to eval.jsonl.

        Nothing happens if the evaluation is already recorded.

        Raises:
          VerifierFailed: a verifier could not score any answer of the first evaluation.
          TrainingFailed: the weights on a device changed during the evaluation.
        """
        if self.evaluations.has(when, step):
            return
        # Evaluations during training have a phase of their own: they may use fewer questions.
        self.on_phase("evaluation during training" if when == "during" else "evaluation", step)
        failures_before = self.task_data.grader.counters()
        graded_before = self.task_data.shown_to_verifiers()
        results = self._evaluate_sets(self.run.params(state.train), step, when)
        if not self.evaluations.records:
            # Raise before the evaluation is recorded, so that the resumed run repeats it.
            graded_after = self.task_data.shown_to_verifiers()
            for name, has_failed in all_failed(graded_before, graded_after).items():
                if has_failed:
                    self._refuse_verifier(state, step, name, "of the first evaluation")
        record = evaluation_record(
            step, when, results, dense=self.config.eval.cut_every is not None
        )
        if self.writes:
            append_line(self.folder.evaluations, record)
            numbers = evaluation_numbers(record["sets"], self.evaluated_sets("after"))
            self.metrics.show(step, "numbers", numbers)
        self.evaluations.add(record)
        if self.writes:
            self.evaluations.write_best()
        failed = self.task_data.failures(failures_before)
        notes = evaluation_notes(
            failed,
            record,
            format_report=self.config.output.format_report,
            answer_tokens=self.config.rollout.answer_tokens,
        )
        for line in notes:
            self.progress.print_line(line)
        if when not in ENDPOINTS:
            before = self.evaluations.endpoints.get("before", {})
            print_results(self.progress, step, before, record["sets"])

    def _evaluate_sets(self, params: Params, step: int, when: str) -> dict[str, Any]:
        """Evaluates the policy on each set. Raises TrainingFailed if a device changed weights."""
        decoder = Decoder(
            self.policy.decode_params(params),
            self.policy.evaluation,
            self.policy.phi_of(params),
            cap(self.config.budget),
        )
        results = {}
        first = "" if self.evaluations.records else "compiling"
        for name, questions in self.evaluated_sets(when).items():
            config = self.config.eval
            if name == HOLDOUT:
                # All questions and greedy, because the result selects the best checkpoint.
                config = dataclasses.replace(config, size=None, samples=0)
            with (
                self.progress.phase(f"evaluation {when}, {name}", 1, first) as phase,
                phase_memory("evaluation", problems=len(questions)),
            ):
                results[name] = evaluate_set(
                    decoder,
                    self.task_data.graded_like(questions),
                    questions,
                    jax.random.fold_in(jax.random.key(self.config.seed), _EVALUATION_STREAM),
                    config=config,
                    seed=self.config.seed,
                    spec=name,
                    on_progress=lambda done, total: phase.update(done, total=total),
                    poll=self.poll,
                )
        with self._stops_on_mismatch(step):
            check_replicas(decoder.params)
            evaluated_digests = digests(decoder.params)
            # Free the decoder first, because two copies of the parameters might not fit in memory.
            del decoder
            verify(self.policy.decode_params(params), evaluated_digests)
        return results

    def finish(self, state: RunState, step: int) -> dict[str, Any]:
        """Saves the last checkpoint, writes summary.json and the report, and prints the results.

        Returns:
          The content of summary.json.
        """
        self.leave(state, step, finished=True)
        seconds = self.took or self.wall_seconds
        worse = self.evaluations.declines_by_set()
        summary = self._summary(state, step, seconds, worse)
        if not self.writes:
            return summary
        write_json(self.folder.summary, summary)
        print_tables(
            self.progress,
            self.evaluated_sets("after"),
            self.evaluations.endpoints["before"],
            self.evaluations.endpoints["after"],
            self.method.name if self.preset is None else self.preset.name,
        )
        publish(
            self.folder,
            self.metrics,
            step,
            report=self.config.output.report,
            again=self.took is not None,
        )
        self.progress.print_line(
            f"{step} steps, {int(state.generated_tokens):,} generated tokens, "
            f"{duration(seconds)}; everything is in {self.folder.path}"
        )
        for line in self.limited.lines():
            self.progress.print_line(line)
        question = next(iter(self.task_data.eval.values())).set.questions[0]
        method = resolve(self.config).method
        warmup = self.config.warmup
        lines = next_lines(method, warmup, self.folder.path, question)
        self.progress.print_line("\n".join(lines), wrap=False)
        has_sft = self.method.rejection_sft is not None
        start = start_policy(self.folder, warmup, self.config.model.path, has_sft=has_sft)
        for line in end_lines(self.folder.path, step, self.evaluations.best_record, worse, start):
            self.progress.print_line(line)
        return summary

    def _summary(
        self, state: RunState, step: int, seconds: float, worse: Mapping[str, list[Decline]]
    ) -> dict[str, Any]:
        """Returns the content of summary.json."""
        first_set = next(iter(self.task_data.eval))
        endpoints = self.evaluations.endpoints
        return {
            "method": self.method.name,
            "preset": None if self.preset is None else self.preset.text,
            "departures": self.departures,
            "seed": self.config.seed,
            "steps": step,
            "wall_seconds": seconds,
            "generated_tokens": int(state.generated_tokens),
            "limited_updates": self.limited._asdict(),
            "best": self.evaluations.best_record,
            "declines": {
                name: [decline._asdict() for decline in of_set] for name, of_set in worse.items()
            },
            "eval": {when: sets[first_set] for when, sets in endpoints.items()},
            "sets": endpoints,
        }


def _is_due(step: int, every: int | None) -> bool:
    """True if the step is a multiple of `every`. Always False if `every` is None."""
    return every is not None and step % every == 0
