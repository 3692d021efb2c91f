"""Samples and grades a policy's answers at given budgets.

The training loop calls `evaluate_set` between training steps. `bacr evaluate` calls `draw_samples`
for each batch (see `job`). The modules `ask` and `served` use only the class `Decoder`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_grading import LENIENT
from bacr_jax.config import EvalConfig
from bacr_jax.config.derived import cap
from bacr_jax.config.settings import Settings, resolve
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import (
    CLOSE_NAMES,
    GREEDY,
    EvalSampling,
    EvalSetting,
    Part,
    Sample,
    dense_settings,
    eval_settings,
    graded,
    subset,
)
from bacr_jax.evaluation.summary import summarise
from bacr_jax.methods import load_method
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.prompts.encoding import encode_text, line_breaks, with_ids
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.rollout import (
    Callbacks,
    Rollout,
    RolloutRequest,
    RolloutSpec,
    SamplingSetup,
    generate,
    sampling_params,
)
from bacr_jax.rollout.branches import CUTS_AT_ONCE
from bacr_jax.runs import setup
from bacr_jax.runs.saved_policy import SavedPolicy
from bacr_jax.types import CLOSED_BY_BUDGET, NO_BUDGET, Branches, Poll, Prompts, Trunks

# Fields of a `Sample` that are copied from its verdict.
_VERDICT_FIELDS = ("extracted", "correct", "strict", "path", "timed_out")
# Parameters that stay in float32: the budget module, and the LoRA adapters until they are merged
# into the weights.
_ADAPTER_NAMES = ("adapter", "adapter_scale")
_FLOAT32_NAMES = ("budget", *_ADAPTER_NAMES)


@dataclass(frozen=True)
class Decoder:
    """A policy that is ready to sample answers.

    Attributes:
      params: weights of the policy, in the layout for decoding.
      spec: static settings of the rollout. Its maximum thinking length covers every evaluated
        budget.
      phi_of: function that maps budgets to budget embeddings, or None if the policy has no budget
        embedding.
      cap: maximum number of thinking tokens of a trace without a budget.
      sample: function that replaces `rollout.generate` if a server samples, otherwise None.
    """

    params: DecodeParams
    spec: RolloutSpec
    phi_of: Callable[[jax.Array], jax.Array] | None
    cap: int
    sample: Callable[..., Rollout] | None = None

    def traces(
        self, prompts: Sequence[Prompts], parts: Sequence[Part], sampling: EvalSampling
    ) -> list[tuple[Trunks, Branches]]:
        """Samples thinking up to the budget, and an answer at each truncation point (cut).

        A part is a list of rows (one trace each) with one decoding mode and budget. All parts are
        sampled in one call and share its decoding slots (the traces that are decoded at the same
        time). Rows with the largest budgets start first.

        Args:
          prompts: prompts of the rows of each part.
          parts: row numbers and settings to sample.
          sampling: sampling setup of the evaluation.

        Returns:
          For each part, the prompts with thinking (`Trunks`) and the answers (`Branches`), as NumPy
          arrays.
        """
        first_settings = [settings[0] for _, settings in parts]
        rows_of_parts = [len(rows) for rows, _ in parts]
        limits = []
        cuts = []
        for _, settings in parts:
            limit = _limit(settings, self.cap)
            limits.append(limit)
            cuts.append([limit if setting.cut is None else setting.cut for setting in settings])

        def for_each_row(values: Sequence[Any]) -> np.ndarray:
            return np.repeat(np.asarray(values, np.int32), rows_of_parts, 0)

        rows = RolloutRequest(
            for_each_row([setting.budget for setting in first_settings]),
            for_each_row(cuts),
            ids=np.concatenate([rows for rows, _ in parts]),
            limits=for_each_row(limits),
            streams=for_each_row(range(len(parts))),
        )
        # The number of streams (groups of rows with the same PRNG key and temperature) is part of
        # the compiled program. It is rounded up to a power of two, so that all evaluations need
        # only a few programs.
        num_streams = 2 ** (len(parts) - 1).bit_length()
        padding = [first_settings[-1]] * (num_streams - len(parts))
        streams = [*first_settings, *padding]
        # The budget is taken modulo 2^32, because `fold_in` does not accept negative numbers.
        keys = [jax.random.fold_in(sampling.key, setting.budget % 2**32) for setting in streams]
        greedy = [setting.mode == GREEDY for setting in streams]
        config = sampling.config
        sampler = SamplingSetup(
            dataclasses.replace(self.spec, max_parallel_cuts=CUTS_AT_ONCE),
            sampling.task_data.rules,
            sampling_params(
                [0.0 if is_greedy else config.temperature for is_greedy in greedy],
                1.0 if all(greedy) else config.top_p,
            ),
            self.phi_of,
        )
        sample = self.sample or generate
        rollout = sample(
            self.params,
            stacked(prompts),
            rows,
            jnp.stack(keys),
            sampler,
            Callbacks(sampling.poll, lambda rows, *_: sampling.on_rows(len(rows))),
        )
        arrays = jax.tree.map(np.asarray, (rollout.trunks, rollout.branches))
        ends = np.cumsum(rows_of_parts)
        return [
            jax.tree.map(lambda array, rows=slice(end - count, end): array[rows], arrays)
            for end, count in zip(ends, rows_of_parts)
        ]


def _limit(settings: Sequence[EvalSetting], cap: int) -> int:
    """Returns the maximum number of thinking tokens of traces that several settings share.

    The limit is the largest truncation point. If there is no truncation point, it is the budget.

    Args:
      settings: settings of the traces, in ascending order of truncation points.
      cap: maximum number of thinking tokens of a trace without a budget.
    """
    last = settings[-1]
    if last.cut is not None:
        return last.cut
    return cap if last.budget == NO_BUDGET else last.budget


def stacked(prompts: Sequence[Prompts]) -> Prompts:
    """Concatenates prompts, padded to the largest width."""
    width = max(part.tokens.shape[1] for part in prompts)
    padded = [part.padded(width) for part in prompts]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *padded)


def open_decoder(
    saved: SavedPolicy,
    vocab_size: int,
    *,
    max_thinking: int,
    slots: int | None = None,
    num_devices: int = 1,
) -> Decoder:
    """Loads a saved policy onto its devices in its compute dtype.

    Args:
      saved: policy to load.
      vocab_size: number of embedding rows of a custom model.
      max_thinking: maximum number of thinking tokens of a trace.
      slots: number of traces decoded at the same time on all devices, or None to use the number
        from the policy's evaluation settings. It is rounded up to a multiple of the number of
        shards of the batch.
      num_devices: number of devices.

    Raises:
      UserError: if the budget module is missing, or the shape of the embedding does not match the
        config.
    """
    policy = policy_of(resolve(saved.config), vocab_size, num_devices)
    params = saved.params()
    conditioned = policy.learner.conditioning is not None
    if conditioned and "budget" not in params:
        raise UserError(
            f"{saved.folder}: the config enables the budget embedding, but the folder does not "
            "contain its weights. The folder may be incomplete; copy or export it again"
        )
    shape = policy.learner.model
    if params["embed"].shape != (shape.vocab_size, shape.hidden_size):
        raise UserError(
            f"{saved.folder}: the embedding matrix has shape {params['embed'].shape}, but the "
            f"config specifies {(shape.vocab_size, shape.hidden_size)}, so model.path is the "
            "folder of another model; set model.path to the model that was trained"
        )
    module = {"budget": params["budget"]} if conditioned else {}
    adapter = {name: params[name] for name in _ADAPTER_NAMES if name in params}
    body = {name: leaf for name, leaf in params.items() if name not in _FLOAT32_NAMES}
    # Cast on the host, so that the device never stores the weights in float32. Adapters are
    # merged in float32.
    dtype = policy.learner.dtype
    body = jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), body)
    decode_params = policy.decode_params(policy.place({**body, **adapter, **module}))
    shards = policy.evaluation.row_shards
    slots_of_shard = -(-(slots or policy.evaluation.slots) // shards)
    spec = dataclasses.replace(
        policy.evaluation, max_thinking=max_thinking, slots=slots_of_shard * shards
    )
    module = policy.place(jax.tree.map(jnp.asarray, module))
    return Decoder(decode_params, spec, policy.phi_of(module), cap(saved.config.budget))


def policy_of(settings: Settings, vocab_size: int, num_devices: int) -> setup.Policy:
    """Returns the policy of a run. With several devices, its mesh can be used only for decoding."""
    policy = settings.policy
    mesh = None
    if num_devices > 1:
        shape = setup.model_shape(policy.model, vocab_size)
        mesh = setup.decoding_mesh(policy.mesh, shape, num_devices)
    return setup.make_policy(policy, load_method(settings.method), vocab_size, mesh)


def declaration(
    tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Int[np.ndarray, "n"]:
    """Returns the token ids of the budget tag, with which a response begins in some prompt formats.

    The evaluation appends these tokens to the prompt, so that the policy continues after the tag.
    The array is empty if the format has no budget tag, or if the policy writes the tag itself.
    """
    if not style.budget_close or config.budget_tag == "declared":
        return np.zeros(0, np.int32)
    return encode_text(tokenizer, f"{budget}{style.budget_close}")


def with_declared_budget(
    prompts: Prompts, tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Prompts:
    """Appends the budget tag (`declaration`) to prompts. With NO_BUDGET, they are unchanged."""
    if budget == NO_BUDGET:
        return prompts
    declared = declaration(tokenizer, style, config, budget)
    if not len(declared):
        return prompts
    # Pad to the same width for all budgets of the config, so that they share one compiled
    # program.
    longest = max(len(declaration(tokenizer, style, config, b)) for b in (*config.budgets, budget))
    return with_ids(prompts, declared).padded(prompts.tokens.shape[1] + longest)


def check_grace(grace: int, tokenizer: Any) -> None:
    """Checks that the tokenizer supports a grace window, which ends at line breaks.

    Args:
      grace: `budget.grace`, the length of the grace window in tokens.
      tokenizer: tokenizer of the policy.

    Raises:
      UserError: if the grace window is not empty and no token contains a line break.
    """
    if grace and not line_breaks(tokenizer, len(tokenizer)).any():
        raise UserError(
            f"budget.grace={grace}: the grace window lets thinking end at a line break, but no "
            "token of this tokenizer contains one; set budget.grace=0"
        )


def draw_samples(
    decoder: Decoder,
    questions: PromptedQuestions,
    chosen: Int[np.ndarray, "n"],
    parts: Sequence[Part],
    sampling: EvalSampling,
    *,
    name: str,
) -> list[list[Sample]]:
    """Samples and grades the answers of several parts, which are decoded together.

    A part is a list of rows (one trace each) with one decoding mode and budget. A setting is a
    decoding mode, a budget and a truncation point.

    Args:
      decoder: policy that samples the answers.
      questions: questions of the set.
      chosen: indices of the evaluated questions in `questions`.
      parts: row numbers and settings. All parts must have the same number of settings.
      sampling: sampling setup of the evaluation.
      name: name of the set, which is stored in the samples.

    Returns:
      For each part, one sample per row and setting, ordered by row and then by setting.
    """
    task_data = sampling.task_data
    problems = [chosen[rows // settings[0].samples] for rows, settings in parts]
    prompts = []
    for (_, settings), indices in zip(parts, problems):
        budget = settings[0].budget
        part_prompts = questions.at(indices, np.full_like(indices, budget))
        prompts.append(
            with_declared_budget(
                part_prompts, task_data.tokenizer, task_data.style, sampling.config, budget
            )
        )
    traces = decoder.traces(prompts, parts, sampling)
    return [
        _graded_samples(sampling, questions, indices, part, trunks, branches, name=name)
        for part, indices, (trunks, branches) in zip(parts, problems, traces)
    ]


def _graded_samples(
    sampling: EvalSampling,
    questions: PromptedQuestions,
    problems: Int[np.ndarray, "rows"],
    part: Part,
    trunks: Trunks,
    branches: Branches,
    *,
    name: str,
) -> list[Sample]:
    """Grades the answers of one part of `draw_samples`.

    Args:
      problems: index of each trace's problem in `questions`.
      part: row numbers and settings of the traces.
    """
    task_data = sampling.task_data
    data = questions.set
    rows, settings = part
    texts: list[str] = []
    asked: list[str] = []
    records: list[dict[str, Any]] = []
    for row, problem in enumerate(problems):
        for lane, setting in enumerate(settings):
            # The last cut (truncation point) is the end of the trace.
            early_cut = None if setting.cut == settings[-1].cut else setting.cut
            thinking, answer, counts = _read_cut(
                task_data.tokenizer, trunks, branches, row, lane, early_cut
            )
            texts.append(thinking + answer)
            asked.append(data.questions[problem])
            records.append(
                {
                    "set": name,
                    "id": data.ids[problem],
                    "mode": setting.mode,
                    "budget": setting.budget,
                    "cut": setting.cut,
                    "sample": int(rows[row] % setting.samples),
                    "level": int(data.levels[problem]),
                    "subject": data.subjects[problem],
                    # The thinking is stored only once for each trace.
                    "text": answer if early_cut is not None else thinking + answer,
                    "gold": data.answers[problem],
                    **counts,
                }
            )
    grading = task_data.graded_like(questions)
    verdicts = grading.grader.grade(
        [_graded_text(grading, text) for text in texts],
        [record["gold"] for record in records],
        mode=LENIENT,
        poll=sampling.poll,
        questions=asked,
    )
    samples = []
    for record, verdict in zip(records, verdicts):
        verdict_fields = {field: getattr(verdict, field) for field in _VERDICT_FIELDS}
        samples.append(Sample(**record, **verdict_fields))
    return samples


def _graded_text(task_data: TaskData, text: str) -> str:
    """Returns the text for the current grader of `task_data`, as in training.

    Args:
      text: thinking, forced suffix and answer. The prompt contains the tag that opens the thinking.
    """
    if task_data.grades_responses:
        return task_data.style.think_open + text
    return for_grader(text, task_data.style)


def for_grader(text: str, style: PromptFormat) -> str:
    """Replaces the format's closing tag for thinking with </think>, which the graders expect."""
    return text.replace(style.think_close, "</think>", 1) if style.think_close else text


def _read_cut(
    tokenizer: Any, trunks: Trunks, branches: Branches, row: int, lane: int, cut: int | None
) -> tuple[str, str, dict[str, Any]]:
    """Extracts the answer at one truncation point (cut) of a trace.

    Args:
      row: index of the trace.
      lane: index of the cut along the axis of cuts in `branches`.
      cut: number of thinking tokens before the answer, or None for the full thinking.

    Returns:
      A tuple of three values: the text of the thinking up to the cut, the text after the cut
      (forced suffix and answer), and the fields of a `Sample` about token counts and endings.
    """
    thinking = int(trunks.thinking[row])
    sampled = int(trunks.sampled[row])
    # If the thinking ended before the cut (truncation point), it is used in full, including its
    # closing tag.
    used = sampled if cut is None or cut >= thinking else cut
    early = used < sampled
    thinking_ids = trunks.thinking_ids(row)[:used]
    forced_ids = branches.forced_ids(row, lane)
    answer_ids = branches.answer_ids(row, lane)
    thinking_text = decode_ids(tokenizer, thinking_ids)
    text = decode_ids(tokenizer, thinking_ids + forced_ids + answer_ids)
    # The tokens of one character can be split between the thinking and the answer. In this case,
    # the entire text is returned as the answer.
    if not text.startswith(thinking_text):
        thinking_text = ""
    counts = {
        "thinking_tokens": used if early else thinking,
        "forced_tokens": len(forced_ids),
        "answer_tokens": len(answer_ids),
        "total_tokens": used + len(forced_ids) + len(answer_ids),
        "closed_by": CLOSE_NAMES[CLOSED_BY_BUDGET if early else int(trunks.close[row])],
        "finished": bool(branches.finished[row, lane]),
    }
    return thinking_text, text[len(thinking_text) :], counts


def evaluate_set(
    decoder: Decoder,
    task_data: TaskData,
    questions: PromptedQuestions,
    key: jax.Array,
    *,
    config: EvalConfig,
    seed: int,
    spec: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    poll: Poll = None,
) -> dict[str, Any]:
    """Evaluates a policy on one set at all budgets, between training steps.

    The thinking is truncated at each budget in the same way for all methods.

    Args:
      decoder: policy to evaluate.
      task_data: tokenizer, prompt format and graders.
      questions: questions of the set.
      key: PRNG key for sampling.
      config: evaluation settings.
      seed: random seed for selecting `config.size` questions.
      spec: entry of `data.eval` for this set. Needed if `config.samples` has a number of samples
        for each set.
      on_progress: called with the number of decoded traces and the total number of traces.
      poll: called regularly. It may raise an exception to stop.

    Returns:
      The results of the set, as returned by `summarise`.
    """
    chosen = subset(len(questions), config.size, seed)
    settings = [[setting] for setting in eval_settings(config, spec)]
    settings += dense_settings(config, spec)
    total = len(chosen) * sum(together[0].samples for together in settings)
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if on_progress is not None:
            on_progress(done, total)

    sampling = EvalSampling(task_data, key, config, poll, count)
    results = {}
    # All parts of one call must have the same number of truncation points.
    for _, same_length in itertools.groupby(settings, key=len):
        parts = [(np.arange(len(chosen) * cuts[0].samples), cuts) for cuts in same_length]
        samples = draw_samples(decoder, questions, chosen, parts, sampling, name=questions.set.name)
        for (_, cuts), part_samples in zip(parts, samples):
            for lane, setting in enumerate(cuts):
                results[setting] = graded(part_samples[lane :: len(cuts)], setting)
    grader = task_data.graded_like(questions).grader
    return summarise(results, grader, problems=questions.set.take(chosen), poll=poll)
