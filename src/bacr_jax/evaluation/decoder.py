"""Drawing and grading answers at a budget: the one place where a policy is evaluated."""

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
from bacr_jax.config import Config, EvalConfig
from bacr_jax.config.derived import cap
from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import (
    CLOSE_NAMES,
    GREEDY,
    Drawing,
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
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.rollout import (
    Listeners,
    Rollout,
    RolloutSpec,
    Rows,
    Sampler,
    generate,
    sampling_params,
)
from bacr_jax.rollout.branches import CUTS_AT_ONCE
from bacr_jax.runs import setup
from bacr_jax.runs.open import SavedPolicy
from bacr_jax.types import CLOSED_BY_BUDGET, NO_BUDGET, Branches, Poll, Prompts, Trunks

# Fields of a `Sample` that are those of its verdict.
_OF_THE_GRADER = ("extracted", "correct", "strict", "path", "timed_out")


@dataclass(frozen=True)
class Decoder:
    """A policy ready to answer.

    Attributes:
      spec: rollout shapes; its thinking width holds every budget asked for.
      cap: most thinking tokens of a row that is told no budget.
      sample: what stands in for `rollout.generate` where the policy answers elsewhere.
    """

    params: DecodeParams
    spec: RolloutSpec
    phi_of: Callable[[jax.Array], jax.Array] | None
    cap: int
    sample: Callable[..., Rollout] | None = None

    def traces(
        self, prompts: Sequence[Prompts], parts: Sequence[Part], drawing: Drawing
    ) -> list[tuple[Trunks, Branches]]:
        """Thinking up to the budget, and an answer at each cut, for each row; on the host.

        All parts in one call: their rows share slots, the largest budgets first.
        """
        first = [settings[0] for _, settings in parts]
        counts = [len(rows) for rows, _ in parts]
        limits = [self.cap if s.budget == NO_BUDGET else s.budget for s in first]
        cuts = [
            [limit if s.cut is None else s.cut for s in settings]
            for (_, settings), limit in zip(parts, limits)
        ]
        each = lambda numbers: np.repeat(np.asarray(numbers, np.int32), counts, 0)
        # Programs depend on how many streams there are: a few numbers serve all evaluations.
        streams = [*first, *[first[-1]] * (2 ** (len(first) - 1).bit_length() - len(first))]
        # Keys take numbers from 0 on.
        keys = [jax.random.fold_in(drawing.key, setting.budget % 2**32) for setting in streams]
        greedy = [setting.mode == GREEDY for setting in streams]
        config = drawing.config
        rollout = (self.sample or generate)(
            self.params,
            stacked(prompts),
            Rows(
                each([setting.budget for setting in first]),
                each(cuts),
                ids=np.concatenate([rows for rows, _ in parts]),
                limits=each(limits),
                streams=each(range(len(parts))),
            ),
            jnp.stack(keys),
            Sampler(
                dataclasses.replace(self.spec, cuts_at_once=CUTS_AT_ONCE),
                drawing.environment.rules,
                sampling_params(
                    [0.0 if most_likely else config.temperature for most_likely in greedy],
                    1.0 if all(greedy) else config.top_p,
                ),
                self.phi_of,
            ),
            Listeners(drawing.poll, lambda rows, *_: drawing.on_rows(len(rows))),
        )
        drawn = jax.tree.map(np.asarray, (rollout.trunks, rollout.branches))
        ends = np.cumsum([0, *counts])
        pick = lambda start, stop: jax.tree.map(lambda x: x[start:stop], drawn)
        return [pick(start, stop) for start, stop in zip(ends, ends[1:])]


def stacked(prompts: Sequence[Prompts]) -> Prompts:
    """Prompts one after the other, padded to the widest."""
    width = max(part.tokens.shape[1] for part in prompts)
    wide = [part.padded(width) for part in prompts]
    return jax.tree.map(lambda *x: np.concatenate(x), *wide)


def open_decoder(
    saved: SavedPolicy,
    vocab_size: int,
    *,
    max_thinking: int,
    slots: int | None = None,
    num_devices: int = 1,
) -> Decoder:
    """A saved policy on its devices, in its compute type.

    Args:
      slots: rows decoded together, on all devices; None: as many as in the policy's own
        evaluations. The next number that all of them can share evenly is taken.
    """
    policy = policy_of(saved.config, vocab_size, num_devices)
    params = saved.params()
    conditioned = policy.learner.conditioning is not None
    if conditioned and "budget" not in params:
        raise UserError(f"{saved.folder}: its policy has no budget module; copy it again")
    shape = policy.learner.model
    if params["embed"].shape != (shape.vocab_size, shape.hidden_size):
        raise UserError(
            f"{saved.folder}: its embedding has shape {params['embed'].shape}, but its config "
            f"says {(shape.vocab_size, shape.hidden_size)}; write model.path=FOLDER"
        )
    module = {"budget": params["budget"]} if conditioned else {}
    # Cast before they go to the device, which then never holds them in float32; adapters are
    # merged in it.
    dtype = policy.learner.dtype
    beside = ("budget", "adapter", "adapter_scale")
    adapter = {name: params[name] for name in beside[1:] if name in params}
    body = {name: leaf for name, leaf in params.items() if name not in beside}
    body = jax.tree.map(lambda x: x if x.dtype == dtype else x.astype(dtype), body)
    decode = policy.decode_params(policy.place({**body, **adapter, **module}))
    shards = policy.evaluation.row_shards
    slots = -(-(slots or policy.evaluation.slots) // shards) * shards
    spec = dataclasses.replace(policy.evaluation, max_thinking=max_thinking, slots=slots)
    module = policy.place(jax.tree.map(jnp.asarray, module))
    return Decoder(decode, spec, policy.phi_of(module), cap(saved.config))


def policy_of(config: Config, vocab_size: int, num_devices: int) -> setup.Policy:
    """The policy on so many devices, which only decode."""
    mesh = None
    if num_devices > 1:
        mesh = setup.decoding_mesh(config, setup.model_shape(config, vocab_size), num_devices)
    return setup.make_policy(config, load_method(config), vocab_size, mesh)


def declaration(
    tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Int[np.ndarray, "n"]:
    """What follows the prompt of a policy that opens with a budget, if it is given that budget."""
    if not style.budget_close or config.budget_tag == "declared":
        return np.zeros(0, np.int32)
    return encode_text(tokenizer, f"{budget}{style.budget_close}")


def with_declared_budget(
    prompts: Prompts, tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Prompts:
    """Prompts with the budget in them, if there is one and the format has a place for it."""
    declared = lambda b: declaration(tokenizer, style, config, b)
    if budget == NO_BUDGET or not len(given := declared(budget)):
        return prompts
    # All budgets of the config in one width, so that nothing is compiled for each.
    longest = max(len(declared(b)) for b in (*config.budgets, budget))
    return with_ids(prompts, given).padded(prompts.tokens.shape[1] + longest)


def check_grace(config: Config, tokenizer: Any) -> None:
    """A grace window ends at line breaks, which some text must hold."""
    if config.budget.grace and not line_breaks(tokenizer, len(tokenizer)).any():
        raise UserError(
            f"budget.grace={config.budget.grace}: the tokenizer has no line break at which "
            "thinking could end; write 0"
        )


def draw_samples(
    decoder: Decoder,
    questions: Questions,
    chosen: Int[np.ndarray, "n"],
    parts: Sequence[Part],
    drawing: Drawing,
    *,
    name: str,
) -> list[list[Sample]]:
    """Answers and grades rows of several settings, decoded together.

    Args:
      parts: with as many settings in each.

    Returns:
      For every part a sample per row and setting: those of the first row in the order of the
      settings, then the next row's.
    """
    environment = drawing.environment
    places = [chosen[rows // settings[0].samples] for rows, settings in parts]
    prompts = []
    for (_, (setting, *_)), asked in zip(parts, places):
        told = questions.at(asked, np.full_like(asked, setting.budget))
        how = environment.tokenizer, environment.style, drawing.config, setting.budget
        prompts.append(with_declared_budget(told, *how))
    drawn = decoder.traces(prompts, parts, drawing)
    return [
        _samples(drawing, questions, asked, part, *traces, name=name)
        for part, asked, traces in zip(parts, places, drawn)
    ]


def _samples(
    drawing: Drawing,
    questions: Questions,
    places: Int[np.ndarray, "rows"],
    part: Part,
    trunks: Trunks,
    branches: Branches,
    *,
    name: str,
) -> list[Sample]:
    """Traces of a part, whose questions stand at `places`, graded; see `draw_samples`."""
    environment, (rows, settings), data = drawing.environment, part, questions.set
    setting = settings[0]
    cells = [(i, j) for i in range(len(rows)) for j in range(len(settings))]
    # A cut at the budget is the end of the trace.
    early = [None if s.cut == s.budget else s.cut for s in settings]
    read = [_read_cut(environment.tokenizer, trunks, branches, i, j, early[j]) for i, j in cells]
    references = [data.answers[places[i]] for i, _ in cells]
    texts = [thinking + answer for thinking, answer, _ in read]
    verdicts = environment.graded_like(questions).grader.grade(
        [for_grader(text, environment.style) for text in texts],
        references,
        mode=LENIENT,
        poll=drawing.poll,
        questions=[data.questions[places[i]] for i, _ in cells],
    )
    return [
        Sample(
            set=name,
            id=data.ids[places[i]],
            mode=setting.mode,
            budget=setting.budget,
            cut=settings[j].cut,
            sample=int(rows[i] % setting.samples),
            level=int(data.levels[places[i]]),
            subject=data.subjects[places[i]],
            # The thinking once for each trace.
            text=texts[n] if early[j] is None else read[n][1],
            gold=references[n],
            **{field: getattr(verdicts[n], field) for field in _OF_THE_GRADER},
            **read[n][2],
        )
        for n, (i, j) in enumerate(cells)
    ]


def for_grader(text: str, style: PromptFormat) -> str:
    """The text with the tag that ends thinking for the grader, whatever the format's own is."""
    return text.replace(style.think_close, "</think>", 1) if style.think_close else text


def _read_cut(
    tokenizer: Any, trunks: Trunks, branches: Branches, row: int, lane: int, cut: int | None
) -> tuple[str, str, dict[str, Any]]:
    """Thinking up to a cut, what follows it, and the fields of a `Sample` that count tokens."""
    thinking, sampled = int(trunks.thinking[row]), int(trunks.sampled[row])
    # Where it ended by then all of it, its closing tag too.
    kept = sampled if cut is None or cut >= thinking else cut
    early = kept < sampled
    forced, answered = int(branches.forced[row, lane]), int(branches.sampled[row, lane])
    thought = trunks.tokens[row, int(trunks.prompt_lengths[row]) :][:kept].tolist()
    answer = branches.tokens[row, lane, : forced + answered].tolist()
    before, whole = decode_ids(tokenizer, thought), decode_ids(tokenizer, thought + answer)
    # A character can begin in the thinking and end in the answer.
    before = before if whole.startswith(before) else ""
    counts = {
        "thinking_tokens": kept if early else thinking,
        "forced_tokens": forced,
        "answer_tokens": answered,
        "total_tokens": kept + forced + answered,
        "closed_by": CLOSE_NAMES[CLOSED_BY_BUDGET if early else int(trunks.close[row])],
        "finished": bool(branches.finished[row, lane]),
    }
    return before, whole[len(before) :], counts


def evaluate_set(
    decoder: Decoder,
    environment: Environment,
    questions: Questions,
    key: jax.Array,
    *,
    config: EvalConfig,
    seed: int,
    spec: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    poll: Poll = None,
) -> dict[str, Any]:
    """A policy on one set at several budgets, in one go: what training does between its steps.

    Forced termination at each budget, the same for every method.

    Args:
      spec: the set of data.eval, where `config.samples` is not one number.
    """
    chosen = subset(len(questions), config.size, seed)
    settings = [[setting] for setting in eval_settings(config, spec)]
    settings += dense_settings(config, spec)
    total, done = len(chosen) * sum(together[0].samples for together in settings), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if on_progress is not None:
            on_progress(done, total)

    drawing = Drawing(environment, key, config, poll, count)
    results = {}
    # As many cuts in every part of a call.
    for _, alike in itertools.groupby(settings, key=len):
        parts = [(np.arange(len(chosen) * cuts[0].samples), cuts) for cuts in alike]
        samples = draw_samples(decoder, questions, chosen, parts, drawing, name=questions.set.name)
        for (_, cuts), drawn in zip(parts, samples):
            for place, setting in enumerate(cuts):
                results[setting] = graded(drawn[place :: len(cuts)], setting)
    grader = environment.graded_like(questions).grader
    return summarise(results, grader, problems=questions.set.take(chosen), poll=poll)
