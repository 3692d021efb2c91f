"""A thinking budget that holds while transformers generates (PyTorch).

    model.generate(**inputs, budget=512)
    model.generate(**inputs, budget=[512, 0, None, "low"])  # one per row

A row thinks until it closes its thinking itself, ends its turn, or has written as many tokens as
its budget; then the closing text is written for it, and it answers. The section `thinking` of
config.json says which tokens these are. None is told to the model as no budget and thinks up to
`thinking["cap"]` tokens. This file needs torch and transformers only.
"""

import contextlib
import copy
import hashlib
import json
import numbers
from pathlib import Path

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

# What transformers calls the cache, as an argument and in outputs; 5.24 renamed it.
RENAMED = "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__
CACHE = "cache" if RENAMED else "past_key_values"
# A row that is told no budget, and the largest number that is one.
NONE, LARGEST = -1, 2**31 - 1
# What a row is doing.
THINKING, FORCED, ANSWERING, DONE = range(4)


def check_files(folder):
    """ValueError: a file of a local folder is not what its manifest.json says it was."""
    manifest = Path(folder) / "manifest.json"
    expected = json.loads(manifest.read_text()) if manifest.is_file() else {}
    for name, digest in expected.items():
        found = hashlib.sha256()
        with contextlib.suppress(OSError), (Path(folder) / name).open("rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
        if found.hexdigest() != digest and not name.endswith(".md"):
            raise ValueError(
                f"{Path(folder) / name}: is not what was written, as manifest.json says; copy the "
                "folder again, or remove manifest.json if you changed the file yourself"
            )


def _read_one(budget, levels):
    """One budget as a number; NONE for no budget."""
    if budget is None or (isinstance(budget, str) and budget == "none"):
        return NONE
    if isinstance(budget, str) and budget in levels:
        return levels[budget]
    # True is a number for Python.
    whole = isinstance(budget, numbers.Integral) and not isinstance(budget, bool)
    if not whole or not 0 <= budget <= LARGEST:
        known = f", or a level ({', '.join(levels)})" if levels else ""
        raise ValueError(
            f"budget: found {budget!r}; write a whole number from 0 to {LARGEST}, None{known}"
        )
    return int(budget)


def read_budgets(budget, rows, levels=None):
    """The budget of each row, as numbers; NONE for a row that is told none.

    Args:
      budget: thinking tokens for all rows (a number, None, "none" or the name of a level), or one
        of these per row, in a list, a tuple, or a tensor or array of whole numbers.
      rows: of the batch; ValueError unless there is a budget for all or for each.
    """
    if hasattr(budget, "tolist"):
        budget = budget.tolist()
    if not isinstance(budget, list | tuple):
        return [_read_one(budget, levels or {})] * rows
    if len(budget) != rows:
        raise ValueError(
            f"budget: found {len(budget)} for a batch of {rows}; write one number, or one per row"
        )
    return [_read_one(one, levels or {}) for one in budget]


def numbers_in(text):
    """The numbers of `3 7-9`: 3, 7, 8 and 9."""
    ends = [part.partition("-") for part in text.split()]
    return [n for low, _, high in ends for n in range(int(low), int(high or low) + 1)]


def _flags(text, size):
    found = torch.zeros(size, dtype=torch.bool)
    found[numbers_in(text)] = True
    return found


def next_state(automaton, size):
    """State after each token in each state: [states, V]; the last state means that it was seen."""
    states = automaton["states"]
    table = torch.zeros(states, size, dtype=torch.long)
    # Jumps from any state come first, and those of one state stand over them.
    for source, target, ids in automaton["jumps"]:
        rows = slice(None) if source is None else source
        table[rows, numbers_in(ids)] = target
    table[-1] = states - 1
    return table


class Rules:
    """The section `thinking` of a config, as tensors on a device."""

    def __init__(self, thinking, size, device):
        put = lambda tensor: tensor.to(device)
        forced, natural = thinking["closing_ids"], thinking["answer_ids"]
        width = max(len(forced), len(natural))
        pad = lambda ids: [*ids, *[0] * (width - len(ids))]
        # Row 0 after thinking that was cut or left open, row 1 after thinking that closed itself.
        self.suffixes = put(torch.tensor([pad(forced), pad(natural)]))
        self.lengths = put(torch.tensor([len(forced), len(natural)]))
        self.never = put(_flags(thinking["never_sampled"], size))
        self.ends = put(_flags(" ".join(map(str, thinking["end_ids"])), size))
        self.line_breaks = put(_flags(thinking.get("line_breaks") or "", size))
        self.think_close = put(next_state(thinking["think_close"], size))
        self.answer_close = put(next_state(thinking["answer_close"], size))
        self.grace, self.answer_tokens = thinking["grace"], thinking["answer_tokens"]


class Never(LogitsProcessor):
    """Tokens that are never sampled."""

    def __init__(self, never):
        self.never = never

    def __call__(self, input_ids, scores):
        """Their scores at the bottom."""
        return scores.masked_fill(self.never, float("-inf"))


class Rows:
    """Where each row of a batch stands between its prompt and its end."""

    def __init__(self, rules, limits):
        self.rules, self.limits = rules, limits
        zeros = torch.zeros_like(limits)
        self.phase = torch.where(limits > 0, THINKING, FORCED)
        self.sampled, self.matched, self.place, self.suffix = zeros, zeros, zeros, zeros

    def take(self, drawn, pad):
        """The token that each row gets for the one that was drawn for it.

        A drawn end of the turn is not kept in thinking: the closing text begins in its place. What
        closes the thinking counts against the budget; what is forced does not.
        """
        rules, begun = self.rules, self.phase
        thinking, answering = begun == THINKING, begun == ANSWERING
        after = rules.think_close[self.matched.clamp(max=len(rules.think_close) - 1), drawn]
        closed = thinking & (after == len(rules.think_close) - 1)
        ended = thinking & ~closed & rules.ends[drawn]
        answer = rules.answer_close[self.matched.clamp(max=len(rules.answer_close) - 1), drawn]
        self.matched = torch.where(thinking, after, torch.where(answering, answer, 0))
        self.sampled = self.sampled + (thinking & ~ended | answering)
        more = torch.where(rules.line_breaks[drawn], 0, rules.grace)
        cut = thinking & ~closed & ~ended & (self.sampled >= self.limits + more)
        # The end of a turn is replaced at once, so that its row is forced in this very step.
        forcing = (begun == FORCED) | ended
        place = self.place.clamp(max=rules.suffixes.shape[1] - 1)
        token = torch.where(forcing, rules.suffixes[self.suffix, place], drawn)
        token = torch.where(begun == DONE, pad, token)
        self.place = self.place + forcing
        over = forcing & (self.place >= rules.lengths[self.suffix])
        self.suffix = torch.where(closed, 1, self.suffix)
        finished = answering & (
            (answer == len(rules.answer_close) - 1)
            | rules.ends[drawn]
            | (self.sampled >= rules.answer_tokens)
        )
        self.phase = torch.where(closed | cut | ended, FORCED, begun)
        self.phase = torch.where(over, ANSWERING, torch.where(finished, DONE, self.phase))
        fresh = closed | cut | ended | over
        self.sampled, self.matched = (x.masked_fill(fresh, 0) for x in (self.sampled, self.matched))
        return token

    def stop(self, rows):
        """Rows that end for another reason."""
        self.phase = torch.where(rows, DONE, self.phase)

    @property
    def done(self):
        """Whether every row has ended."""
        return bool((self.phase == DONE).all())


class Loop:
    """Decodes a batch under budgets: what `generate` calls once everything is prepared."""

    def __init__(self, rules, told, limits, streamer):
        self.rules, self.told, self.limits, self.streamer = rules, told, limits, streamer

    def __call__(
        self,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        **model_kwargs,
    ):
        """Prompts with what was generated behind them.

        Only names of transformers' own loops may stand in the signature: others are taken from the
        arguments of `generate` before it has prepared them.
        """
        mode = generation_config.get_generation_mode()
        if mode not in ("greedy_search", "sample"):
            raise ValueError(f"budget: is held by greedy and sampled decoding, found {mode.value}")
        config, device = generation_config, input_ids.device
        copies = input_ids.shape[0] // len(self.limits)
        spread = lambda numbers: torch.tensor(numbers, device=device).repeat_interleave(copies)
        rows = Rows(self.rules, spread(self.limits))
        told = conditions(model, spread(self.told))
        pad = config.pad_token_id
        pad = int(self.rules.ends.nonzero()[0]) if pad is None else pad
        ids, fed, cache = input_ids, input_ids, model_kwargs.pop(CACHE, None)
        mask = model_kwargs.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask
        for name in ("position_ids", "use_cache", "logits_to_keep"):
            model_kwargs.pop(name, None)
        kept: dict = {"scores": [], "logits": []}
        while not rows.done:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
            found = model(
                input_ids=fed,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
                **told(fed, fed is not input_ids),
                **model_kwargs,
            )
            cache, logits = found[CACHE], found.logits[:, -1].float()
            scores = logits_processor(ids, logits.clone())
            if config.output_logits:
                kept["logits"].append(logits)
            if config.output_scores:
                kept["scores"].append(scores)
            if config.do_sample:
                drawn = torch.multinomial(scores.softmax(-1), 1)[:, 0]
            else:
                drawn = scores.argmax(-1)
            fed = rows.take(drawn, pad)[:, None]
            ids = torch.cat([ids, fed], dim=-1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            if self.streamer is not None:
                self.streamer.put(fed[:, 0].cpu())
            rows.stop(stopping_criteria(ids, scores))
        if self.streamer is not None:
            self.streamer.end()
        if not config.return_dict_in_generate:
            return ids
        steps: dict = {name: tuple(found) or None for name, found in kept.items()}
        return GenerateDecoderOnlyOutput(sequences=ids, **{CACHE: cache}, **steps)


def conditions(model, told):
    """From (tokens fed, whether they are of the response) to what tells the model its budgets."""
    if not hasattr(model, "embed_budgets") or bool((told == NONE).all()):
        return lambda fed, response: {}
    embedded = {"budget_embedding": model.embed_budgets(told)}
    if model.config.budget_module["positions"] != "response":
        return lambda fed, response: embedded
    return lambda fed, response: {**embedded, "budget_mask": torch.full_like(fed, response)}


def _limits(told, thinking, config, prompts):
    """Most thinking tokens of each row; ValueError: more than the model's positions leave."""
    limits = [thinking["cap"] if b == NONE else b for b in told]
    free = config.max_position_embeddings - prompts - thinking["answer_tokens"] - thinking["grace"]
    if max(limits) > free:
        at = limits.index(max(limits))
        which = "None" if told[at] == NONE else told[at]
        raise ValueError(
            f"budget: found {which}, which thinks up to {limits[at]} tokens; the model's "
            f"{config.max_position_embeddings} positions leave {free}; write a smaller number"
        )
    return limits


def _with_length(given, arguments, width, needed):
    """Generation settings with room for thinking and answer, unless the caller set a length.

    The caller's `max_new_tokens` becomes that length with the prompt; the folder's own settings
    have one, and transformers warns of two.
    """
    given = copy.deepcopy(given)
    new = arguments.pop("max_new_tokens", None)
    total = arguments.pop("max_length", None)
    if given is not None and new is None and total is None:
        new, total = given.max_new_tokens, given.max_length
    if new is not None or total is None:
        total = width + (needed if new is None else new)
    if given is None:
        return None, {**arguments, "max_length": total}
    given.max_new_tokens, given.max_length = None, total
    return given, arguments


def generate(inputs=None, *, model, budget=None, generation_config=None, streamer=None, **others):
    """As `generate` of transformers, with a budget that holds.

    Args:
      inputs: prompts [B, T], padded on the left; `input_ids` is another name for them.
      budget: thinking tokens, see `read_budgets`.
      **others: as in transformers; without a length everything is generated up to the answer's end.

    Returns:
      Prompts with thinking, closing text and answer behind them.
    """
    if not hasattr(model, "files_checked"):
        check_files(model.name_or_path)
        model.files_checked = True
    thinking = getattr(model.config, "thinking", None)
    if thinking is None:
        raise ValueError("config.json: found no section thinking; export the folder again")
    ids = others.pop("input_ids", None) if inputs is None else inputs
    if ids is None:
        raise ValueError("input_ids: found none; write the tokens of a prompt")
    mask = others.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("attention_mask: found padding on the right; write padding_side='left'")
    if others.get("assistant_model") is not None:
        raise ValueError("assistant_model: budgets are not held with one; leave it out")
    told = read_budgets(budget, len(ids), getattr(model.config, "budget_levels", None))
    longest = ids.shape[1] if mask is None else int(mask.sum(-1).max())
    limits = _limits(told, thinking, model.config, longest)
    suffix = max(len(thinking["closing_ids"]), len(thinking["answer_ids"]))
    needed = max(limits) + thinking["grace"] + suffix + thinking["answer_tokens"]
    config, others = _with_length(generation_config, others, ids.shape[1], needed)
    # Made once for each device.
    made = model.__dict__.setdefault("_budget_rules", {})
    if ids.device not in made:
        made[ids.device] = Rules(thinking, model.config.vocab_size, ids.device)
    rules = made[ids.device]
    processors = LogitsProcessorList([Never(rules.never), *(others.pop("logits_processor", ()))])
    return GenerationMixin.generate(
        model,
        ids,
        generation_config=config,
        logits_processor=processors,
        streamer=streamer,
        custom_generate=Loop(rules, told, limits, streamer),
        **others,
    )
