"""Enforces a thinking budget during generation with transformers (PyTorch).

    model.generate(**inputs, budget=512)
    model.generate(**inputs, budget=[512, 0, None, "low"])  # one per row

A row is one sequence of the batch. It generates thinking tokens until it closes its thinking, ends
its turn, or reaches its budget. Then the closing text is forced, and the row generates its answer.
The section `thinking` of config.json defines the tokens for these steps. If the budget is None, the
model receives no budget, and its thinking is limited to `thinking["cap"]` tokens. This file
requires only torch and transformers.
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

# Name of the KV cache in transformers, both as an argument and in outputs. Version 5.24 renamed it.
RENAMED = "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__
CACHE = "cache" if RENAMED else "past_key_values"
# Value that represents a missing budget, and the maximum budget.
NONE = -1
LARGEST = 2**31 - 1
# Generation phases of a row.
THINKING, FORCED, ANSWERING, DONE = range(4)


def check_files(folder):
    """Raises ValueError if a file of a local folder does not match its digest in manifest.json."""
    manifest = Path(folder) / "manifest.json"
    expected = json.loads(manifest.read_text()) if manifest.is_file() else {}
    for name, expected_digest in expected.items():
        digest = hashlib.sha256()
        with contextlib.suppress(OSError), (Path(folder) / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != expected_digest and not name.endswith(".md"):
            raise ValueError(
                f"{Path(folder) / name} is not the file that was exported, because its SHA-256 "
                "differs from manifest.json; copy the folder again, or remove manifest.json if "
                "you changed the file yourself"
            )


def _read_budget(budget, levels):
    """Converts a budget or the name of a level to a number of tokens, or NONE for no budget."""
    if budget is None or (isinstance(budget, str) and budget == "none"):
        return NONE
    if isinstance(budget, str) and budget in levels:
        return levels[budget]
    # bool is a subclass of int, but is not a valid budget.
    is_integer = isinstance(budget, numbers.Integral) and not isinstance(budget, bool)
    if not is_integer or not 0 <= budget <= LARGEST:
        names = f", or a level ({', '.join(levels)})" if levels else ""
        raise ValueError(
            f"budget: expected a whole number from 0 to {LARGEST}, None{names}, but found "
            f"{budget!r}"
        )
    return int(budget)


def read_budgets(budget, rows, levels=None):
    """Converts budgets to a list with the number of tokens of each row, or NONE for no budget.

    Args:
      budget: budget of all rows, or a list, tuple, tensor or array with one budget per row. A
        budget is a number of thinking tokens, None, "none", or the name of a level. Tensors and
        arrays contain integers.
      rows: number of rows of the batch.
      levels: number of thinking tokens of each level, by name.

    Raises:
      ValueError: a budget is invalid, or the number of budgets differs from the number of rows.
    """
    levels = levels or {}
    if hasattr(budget, "tolist"):
        budget = budget.tolist()
    if not isinstance(budget, list | tuple):
        return [_read_budget(budget, levels)] * rows
    if len(budget) != rows:
        raise ValueError(
            f"budget: found {len(budget)} budgets for a batch of {rows} prompts; pass one budget "
            "for all prompts, or one per prompt"
        )
    return [_read_budget(row_budget, levels) for row_budget in budget]


def numbers_in(text):
    """Parses a list of numbers and ranges, such as `3 7-9`, which yields 3, 7, 8 and 9."""
    result: list[int] = []
    for part in text.split():
        low, _, high = part.partition("-")
        result += range(int(low), int(high or low) + 1)
    return result


def _flags(ids, size):
    """Returns a boolean tensor [size] that is True at the ids in a string such as `3 7-9`."""
    flags = torch.zeros(size, dtype=torch.bool)
    flags[numbers_in(ids)] = True
    return flags


def next_state(automaton, size):
    """Builds the transition table of an automaton that detects a string in a token sequence.

    Args:
      automaton: a stop string in the section `thinking`.
      size: number of token ids V.

    Returns:
      The next state for each state and token, [states, V]. The last state means that the string has
      been found.
    """
    states = automaton["states"]
    table = torch.zeros(states, size, dtype=torch.long)
    # Transitions from any state come first. They are overwritten by transitions from a specific
    # state.
    for source, target, ids in automaton["jumps"]:
        rows = slice(None) if source is None else source
        table[rows, numbers_in(ids)] = target
    table[-1] = states - 1
    return table


class Rules:
    """The section `thinking` of a config, as tensors on a device."""

    def __init__(self, thinking, size, device):
        forced = list(thinking["closing_ids"])
        natural = list(thinking["answer_ids"])
        lengths = [len(forced), len(natural)]
        width = max(lengths)
        forced += [0] * (width - len(forced))
        natural += [0] * (width - len(natural))
        end_ids = " ".join(map(str, thinking["end_ids"]))
        line_breaks = thinking.get("line_breaks") or ""
        # Suffix 0 is used after thinking that was truncated or not closed, suffix 1 after thinking
        # that was closed.
        self.suffixes = torch.tensor([forced, natural]).to(device)
        self.lengths = torch.tensor(lengths).to(device)
        self.never = _flags(thinking["never_sampled"], size).to(device)
        self.ends = _flags(end_ids, size).to(device)
        self.line_breaks = _flags(line_breaks, size).to(device)
        self.think_close = next_state(thinking["think_close"], size).to(device)
        self.answer_close = next_state(thinking["answer_close"], size).to(device)
        self.grace = thinking["grace"]
        self.answer_tokens = thinking["answer_tokens"]


class Never(LogitsProcessor):
    """Logits processor that excludes the tokens in the mask `never` [V] from sampling."""

    def __init__(self, never):
        self.never = never

    def __call__(self, input_ids, scores):
        """Sets the scores of the excluded tokens to minus infinity."""
        return scores.masked_fill(self.never, float("-inf"))


class Rows:
    """The generation state of each row (sequence) of a batch.

    All attributes except `rules` are tensors with one value per row.

    Attributes:
      rules: tokens and automata for thinking and answers.
      limits: maximum number of thinking tokens.
      phase: THINKING, FORCED, ANSWERING or DONE.
      sampled: number of tokens sampled in the current phase.
      matched: state of the automaton that matches the closing tag.
      num_forced: number of tokens forced so far.
      suffix: index in `Rules.suffixes` of the suffix to force.
    """

    def __init__(self, rules, limits):
        self.rules = rules
        self.limits = limits
        zeros = torch.zeros_like(limits)
        self.phase = torch.where(limits > 0, THINKING, FORCED)
        self.sampled = zeros
        self.matched = zeros
        self.num_forced = zeros
        self.suffix = zeros

    def take(self, drawn, pad):
        """Advances all rows by one token and returns the tokens [B] to append.

        An end-of-turn token during thinking is replaced by the first token of the closing text. The
        tag that closes the thinking counts toward the budget, but forced tokens do not.

        Args:
          drawn: sampled token of each row, [B].
          pad: padding token for finished rows.
        """
        rules = self.rules
        phase = self.phase
        thinking = phase == THINKING
        answering = phase == ANSWERING
        last_think_state = len(rules.think_close) - 1
        last_answer_state = len(rules.answer_close) - 1
        think_state = rules.think_close[self.matched.clamp(max=last_think_state), drawn]
        answer_state = rules.answer_close[self.matched.clamp(max=last_answer_state), drawn]
        closed = thinking & (think_state == last_think_state)
        ended = thinking & ~closed & rules.ends[drawn]
        matched = torch.where(thinking, think_state, torch.where(answering, answer_state, 0))
        sampled = self.sampled + (thinking & ~ended | answering)
        grace = torch.where(rules.line_breaks[drawn], 0, rules.grace)
        cut = thinking & ~closed & ~ended & (sampled >= self.limits + grace)
        # If the thinking of a row ends its turn, the first forced token replaces the end-of-turn
        # token in this step.
        forcing = (phase == FORCED) | ended
        position = self.num_forced.clamp(max=rules.suffixes.shape[1] - 1)
        token = torch.where(forcing, rules.suffixes[self.suffix, position], drawn)
        token = torch.where(phase == DONE, pad, token)
        self.num_forced = self.num_forced + forcing
        forced = forcing & (self.num_forced >= rules.lengths[self.suffix])
        self.suffix = torch.where(closed, 1, self.suffix)
        answer_closed = (answer_state == last_answer_state) | rules.ends[drawn]
        finished = answering & (answer_closed | (sampled >= rules.answer_tokens))
        thought = closed | cut | ended
        self.phase = torch.where(thought, FORCED, phase)
        self.phase = torch.where(forced, ANSWERING, torch.where(finished, DONE, self.phase))
        next_phase_begins = thought | forced
        self.sampled = sampled.masked_fill(next_phase_begins, 0)
        self.matched = matched.masked_fill(next_phase_begins, 0)
        return token

    def stop(self, rows):
        """Marks the rows for which `rows` is True as finished."""
        self.phase = torch.where(rows, DONE, self.phase)

    @property
    def done(self):
        """True if all rows are finished."""
        return bool((self.phase == DONE).all())


class Loop:
    """Decoding loop that enforces budgets. `generate` calls it in place of transformers' loop."""

    def __init__(self, rules, budgets, limits, streamer):
        self.rules = rules
        self.budgets = budgets
        self.limits = limits
        self.streamer = streamer

    def __call__(
        self,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        **model_kwargs,
    ):
        """Generates until all rows are finished, and returns what transformers' own loops return.

        All parameters must have the same names as in transformers' loops. Otherwise transformers
        would pass the caller's arguments without preparing them.
        """
        config = generation_config
        mode = config.get_generation_mode()
        if mode not in ("greedy_search", "sample"):
            raise ValueError(
                "budget: a budget can only be used with greedy decoding or sampling, but found the "
                f"generation mode {mode.value!r}; leave out arguments such as num_beams"
            )
        # Number of sequences per prompt.
        copies = input_ids.shape[0] // len(self.limits)
        limits = torch.tensor(self.limits, device=input_ids.device).repeat_interleave(copies)
        budgets = torch.tensor(self.budgets, device=input_ids.device).repeat_interleave(copies)
        rows = Rows(self.rules, limits)
        budget_arguments = conditions(model, budgets)
        pad = config.pad_token_id
        if pad is None:
            pad = int(self.rules.ends.nonzero()[0])
        ids = input_ids
        cache = model_kwargs.pop(CACHE, None)
        # Input tokens of the next forward pass, and True if they belong to the response.
        new_ids = input_ids[:, _cached_length(cache, model, input_ids.shape[1]) :]
        is_response = False
        mask = model_kwargs.pop("attention_mask", None)
        if mask is None:
            mask = torch.ones_like(ids)
        for name in ("position_ids", "use_cache", "logits_to_keep"):
            model_kwargs.pop(name, None)
        all_logits = []
        all_scores = []
        while not rows.done:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            output = model(
                input_ids=new_ids,
                attention_mask=mask,
                position_ids=positions[:, -new_ids.shape[1] :],
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
                **budget_arguments(new_ids, is_response),
                **model_kwargs,
            )
            cache = output[CACHE]
            logits = output.logits[:, -1].float()
            scores = logits_processor(ids, logits.clone())
            if config.output_logits:
                all_logits.append(logits)
            if config.output_scores:
                all_scores.append(scores)
            drawn = _draw(scores, config.do_sample)
            new_ids = rows.take(drawn, pad)[:, None]
            is_response = True
            ids = torch.cat([ids, new_ids], dim=-1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            if self.streamer is not None:
                self.streamer.put(new_ids[:, 0].cpu())
            rows.stop(stopping_criteria(ids, scores))
        if self.streamer is not None:
            self.streamer.end()
        if not config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(all_scores) or None,
            logits=tuple(all_logits) or None,
            **{CACHE: cache},
        )


def _draw(scores, do_sample):
    """Returns a sampled token of each row, or the token with the highest score."""
    if do_sample:
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return scores.argmax(-1)


def _cached_length(cache, model, prompt_length):
    """Returns the number of prompt tokens whose keys and values are in the caller's KV cache.

    Args:
      cache: KV cache, or None.
      model: exported model.
      prompt_length: number of tokens of the prompts, including padding.

    Raises:
      ValueError: if the cache is not empty and can't be used.
    """
    length = 0 if cache is None else int(cache.get_seq_length())
    if length and hasattr(model, "embed_budgets"):
        # The cache does not contain the budgets with which it was computed.
        raise ValueError(
            f"{CACHE}: the KV cache contains {length} tokens, but this model has a budget "
            "embedding, so its keys and values depend on the budget; leave out the cache, or pass "
            "an empty one"
        )
    if length and length >= prompt_length:
        raise ValueError(
            f"{CACHE}: the KV cache contains {length} tokens, but the prompt has only "
            f"{prompt_length}; pass the whole prompt and a cache of its first tokens, at most "
            f"{prompt_length - 1}"
        )
    return length


def conditions(model, budgets):
    """Returns a function that builds the budget arguments of the model's forward pass.

    The arguments of this function are the input tokens of a forward pass, and True if they belong
    to the response. It returns keyword arguments for the model.
    """
    if not hasattr(model, "embed_budgets") or bool((budgets == NONE).all()):
        return lambda ids, is_response: {}
    embedding = {"budget_embedding": model.embed_budgets(budgets)}
    if model.config.budget_module["positions"] != "response":
        return lambda ids, is_response: embedding
    return lambda ids, is_response: {**embedding, "budget_mask": torch.full_like(ids, is_response)}


def _suffix_length(thinking):
    """Returns the largest number of tokens that are forced between thinking and answer."""
    return max(len(thinking["closing_ids"]), len(thinking["answer_ids"]))


def _limits(budgets, thinking, config, prompt_length):
    """Returns the maximum number of thinking tokens of each row.

    Args:
      budgets: budget of each row in tokens, or NONE.
      thinking: section `thinking` of config.json.
      config: config of the model.
      prompt_length: number of tokens of the longest prompt.

    Raises:
      ValueError: a row would exceed the model's number of positions.
    """
    limits = [thinking["cap"] if budget == NONE else budget for budget in budgets]
    positions = config.max_position_embeddings
    free = positions - prompt_length - thinking["grace"] - _suffix_length(thinking)
    free -= thinking["answer_tokens"]
    largest = max(limits)
    if largest > free:
        budget = budgets[limits.index(largest)]
        name = "None" if budget == NONE else budget
        raise ValueError(
            f"budget: {name} allows up to {largest} thinking tokens, but next to the prompt and "
            f"the answer the model's {positions} positions leave room for only {max(free, 0)}; "
            "use a smaller budget"
        )
    return limits


def _with_length(settings, arguments, width, needed):
    """Sets the maximum length of the generated sequences, unless the caller has set it.

    The caller's `max_new_tokens` is converted to `max_length`, because transformers warns if both
    are set, and the folder's generation config contains `max_length`.

    Args:
      settings: generation config of the caller, or None to use the generation config of the folder.
      arguments: keyword arguments of `generate`.
      width: number of tokens of the prompts, including padding.
      needed: maximum number of tokens of thinking and answer.

    Returns:
      (generation config, keyword arguments).
    """
    settings = copy.deepcopy(settings)
    new_tokens = arguments.pop("max_new_tokens", None)
    length = arguments.pop("max_length", None)
    if settings is not None and new_tokens is None and length is None:
        new_tokens = settings.max_new_tokens
        length = settings.max_length
    if new_tokens is not None:
        length = width + new_tokens
    elif length is None:
        length = width + needed
    if settings is None:
        return None, {**arguments, "max_length": length}
    settings.max_new_tokens = None
    settings.max_length = length
    return settings, arguments


def _allow_all_tokens(model, settings, arguments):
    """Sets `top_k` to 0 (all tokens) for sampling, unless the caller or the folder has set it.

    Otherwise transformers would sample only from the 50 most likely tokens.

    Args:
      model: exported model.
      settings: copy of the caller's generation config, or None. Changed in place.
      arguments: keyword arguments of `generate`. Changed in place.
    """

    def value_of(name):
        if name in arguments:
            return arguments[name]
        value = getattr(settings, name, None)
        return getattr(model.generation_config, name) if value is None else value

    # transformers warns if `top_k` is set for greedy decoding.
    if not value_of("do_sample") or value_of("top_k") is not None:
        return
    if settings is None:
        arguments["top_k"] = 0
    else:
        settings.top_k = 0


def generate(inputs=None, *, model, budget=None, generation_config=None, streamer=None, **others):
    """Generates like transformers' `generate`, and enforces a thinking budget.

    Args:
      inputs: prompts [B, T] with left padding. They can also be passed as `input_ids`.
      model: exported model.
      budget: thinking budget, see `read_budgets`.
      generation_config: as in transformers.
      streamer: as in transformers.
      **others: as in transformers, with three differences. If no length is set, each row is
        generated until its answer ends. `top_k` is 0 (all tokens) by default, not 50. A KV cache
        that is not empty must contain the first tokens of the prompts, but not all of them. A model
        with a budget embedding refuses such a cache, because keys and values depend on the budget
        with which they were computed.

    Returns:
      Token ids of the prompts, each followed by its thinking, closing text and answer.

    Raises:
      ValueError: an argument is invalid, or a file of the folder was modified.
    """
    if not hasattr(model, "files_checked"):
        check_files(model.name_or_path)
        model.files_checked = True
    thinking = getattr(model.config, "thinking", None)
    if thinking is None:
        raise ValueError(
            "config.json: the section 'thinking', which describes how budgets are enforced, is "
            "missing; export the folder again with bacr export"
        )
    ids = others.pop("input_ids", None) if inputs is None else inputs
    if ids is None:
        raise ValueError("input_ids: the prompt is missing; pass its token ids")
    mask = others.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask: the shape is {tuple(mask.shape)}, but the prompts have the shape "
            f"{tuple(ids.shape)}; pass whole prompts and a mask of the same shape"
        )
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError(
            "attention_mask: the prompts are padded on the right, but must be padded on the "
            "left; set padding_side='left' in the tokenizer"
        )
    if others.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model: assisted decoding can't be combined with a budget; leave out this "
            "argument"
        )
    budgets = read_budgets(budget, len(ids), getattr(model.config, "budget_levels", None))
    longest = ids.shape[1] if mask is None else int(mask.sum(-1).max())
    limits = _limits(budgets, thinking, model.config, longest)
    needed = max(limits) + thinking["grace"] + _suffix_length(thinking)
    needed += thinking["answer_tokens"]
    config, others = _with_length(generation_config, others, ids.shape[1], needed)
    _allow_all_tokens(model, config, others)
    # Create the rules once per device.
    rules_by_device = model.__dict__.setdefault("_budget_rules", {})
    if ids.device not in rules_by_device:
        rules_by_device[ids.device] = Rules(thinking, model.config.vocab_size, ids.device)
    rules = rules_by_device[ids.device]
    processors = LogitsProcessorList([Never(rules.never), *(others.pop("logits_processor", ()))])
    return GenerationMixin.generate(
        model,
        ids,
        generation_config=config,
        logits_processor=processors,
        streamer=streamer,
        custom_generate=Loop(rules, budgets, limits, streamer),
        **others,
    )
