"""Builds the served policy and its backend from a session. Called by `__main__`.

A session is an opened policy, whose config and tokenizer are loaded. Its weights are loaded when
the backend starts.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_jax.config.derived import cap
from bacr_jax.errors import UserError
from bacr_serve.generation import Backend, Generation
from bacr_serve.policy import ServedPolicy

if TYPE_CHECKING:
    from bacr_jax.evaluation.ask import Session


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Maximum lengths with which prompt, thinking and answer fit into the model's context.

    Attributes:
      largest_budget: maximum budget of a request in tokens.
      prompt_tokens: maximum number of tokens of a prompt.
    """

    largest_budget: int
    prompt_tokens: int


def choose_lengths(
    positions: int, *, reserved: int, prompt_tokens: int, wanted: int, largest: int | None
) -> Lengths:
    """Divides the model's context between the prompt and the thinking.

    Args:
      positions: length of the model's context in tokens.
      reserved: number of tokens reserved for the forced tokens and the answer.
      prompt_tokens: maximum number of prompt tokens in the policy's config.
      wanted: largest budget of the policy's training and evaluation.
      largest: value of --max-budget. If None, it is `wanted`, but at most what the longest prompt
        leaves free, or half of the unreserved tokens if this is more.

    Raises:
      UserError: if `largest` leaves no token for a prompt, or if the context is too short.
    """
    free = positions - reserved
    if free < 2:
        raise UserError(
            f"rollout.answer_tokens: the answer and its tags need {reserved} positions, but the "
            f"model has only {positions} for prompt, thinking and answer together; set a smaller "
            "number"
        )
    if largest is not None and largest >= free:
        raise UserError(
            f"--max-budget {largest}: next to the answer and at least one prompt token, the "
            f"model's {positions} positions leave room for only {free - 1} thinking tokens; use a "
            "smaller number"
        )
    if largest is None:
        largest = max(min(wanted, max(free - prompt_tokens, free // 2)), 1)
    return Lengths(largest, min(prompt_tokens, free - largest))


class SessionEncoder:
    """Converts prompts to token ids with the tokenizer and prompt format of a session."""

    def __init__(self, session: "Session"):
        """Stores the session."""
        self._session = session

    def question(self, question: str, budget: int | None) -> Sequence[int]:
        """Returns the token ids of a question, including its budget if the prompt contains it.

        Raises:
          UserError: if the tokenizer can't encode the question.
        """
        try:
            prompts = self._session.prompts([question], [budget])
        except UserError as error:
            raise UserError(str(error).removeprefix("question 0: ")) from None
        # Some tokenizers raise a plain Exception if they have no token for unknown text.
        except Exception:
            raise UserError("the tokenizer can't encode this text; use another text") from None
        length = int(prompts.lengths[0])
        ids: list[int] = prompts.tokens[0][:length].tolist()
        return ids

    def text(self, text: str) -> Sequence[int]:
        """Returns the token ids of a text. Raises UserError if the tokenizer can't encode it."""
        from bacr_jax.prompts.encoding import encode_text

        try:
            ids: list[int] = encode_text(self._session.tokenizer, text).tolist()
        except Exception:
            raise UserError("the tokenizer can't encode this text; use another text") from None
        return ids


def serve_policy(session: "Session", *, name: str | None, largest: int | None) -> ServedPolicy:
    """Collects the properties of a session's policy that the server needs.

    Args:
      session: the opened policy. Its weights are not loaded.
      name: value of --name, or None to use the name of the folder or of the model.
      largest: value of --max-budget, or None.

    Raises:
      UserError: if the model's context is too short.
    """
    from bacr_jax.prompts.encoding import eos_ids
    from bacr_jax.prompts.stop_strings import vocabulary
    from bacr_jax.runs.setup import model_shape

    config = session.saved.config
    budget = config.budget
    answer_tokens = config.rollout.answer_tokens
    limit_without_budget = cap(config.budget)
    lengths = choose_lengths(
        model_shape(config.model, session.vocab_size).max_positions,
        reserved=answer_tokens + session.rules.suffix_length,
        prompt_tokens=config.data.max_prompt_tokens,
        wanted=max(limit_without_budget, budget.max, *budget.levels.values()),
        largest=largest,
    )
    style = session.style
    temperature, top_p = session.default_sampling()
    return ServedPolicy(
        name=name or session.saved.called or session.saved.folder.absolute().name,
        levels=dict(budget.levels),
        largest_budget=lengths.largest_budget,
        cap=min(limit_without_budget, lengths.largest_budget),
        prompt_tokens=lengths.prompt_tokens,
        answer_tokens=answer_tokens,
        vocabulary=vocabulary(session.tokenizer),
        end_ids=frozenset(eos_ids(session.tokenizer, style)),
        think_close=style.think_close,
        answer_open=style.answer_open,
        answer_close=style.answer_close,
        encoder=SessionEncoder(session),
        temperature=temperature,
        top_p=top_p,
    )


def embedded_backend(
    session: "Session", policy: ServedPolicy, *, slots: int, chunk: int
) -> Backend:
    """Builds the backend that decodes with this package.

    Args:
      session: the opened policy.
      policy: properties of the policy, such as its maximum lengths.
      slots: number of requests that are decoded at the same time.
      chunk: number of tokens of each request that are decoded before they are sent.
    """
    from bacr_serve.embedded import EmbeddedBackend

    def make_slots() -> Any:
        from bacr_jax.evaluation.decoder import open_decoder
        from bacr_serve.slots import Slots

        decoder = open_decoder(
            session.saved, session.vocab_size, max_thinking=policy.largest_budget, slots=slots
        )
        spec = dataclasses.replace(decoder.spec, chunk=chunk)
        decoder = dataclasses.replace(decoder, spec=spec)
        return Slots(decoder, session.rules, prompt_tokens=policy.prompt_tokens)

    # The token is arbitrary, because this request only compiles the programs for short prompts.
    warm_up = Generation(prompt=(0,), budget=1, limit=1)
    return EmbeddedBackend(make_slots, warm_up)


def proxy_backend(session: "Session", policy: ServedPolicy, url: str) -> Backend:
    """Builds the backend that sends requests to the vLLM server at `url`.

    Raises:
      UserError: if the policy is not a folder that was exported by this package, or if its prompt
        format was changed.
    """
    from bacr_client import Server
    from bacr_jax.evaluation.served import check_served, engine_rules
    from bacr_jax.runs.saved_policy import weights_fingerprint
    from bacr_serve.proxy import ProxyBackend

    saved = session.saved
    check_served(saved, "--url")
    rules = engine_rules(saved, session.tokenizer, session.style, session.vocab_size)
    server = Server(url, folder=weights_fingerprint(Path(saved.folder)))
    return ProxyBackend(
        server, rules, longest_prompt=policy.prompt_tokens, largest_budget=policy.largest_budget
    )
