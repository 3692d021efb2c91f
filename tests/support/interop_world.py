"""Creates and exports policies, and samples from them, for comparison with other libraries.

Tests compare the tokens of this package with the tokens of transformers or llama.cpp.
"""

import json
from dataclasses import replace

import jax
import numpy as np

import export_world
import hf_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.config.derived import cap
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation.decoder import open_decoder
from bacr_jax.export import from_run, policy_folder
from bacr_jax.model.hf import reading
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.budget_prompt import budget_words, make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts
from bacr_jax.prompts.task_data import make_rules
from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params
from bacr_jax.runs.saved_policy import open_policy
from bacr_jax.types import NO_BUDGET


def saved_policy(run):
    """Returns a run's policy, prompt format, tokenizer, and sentence with the budget.

    The sentence is empty if prompts contain no budget.
    """
    saved = open_policy(run, None)
    style = from_run.trained_style(resolve(saved.config).method)
    return (
        saved,
        style,
        saved.tokenizer(),
        budget_words(resolve(saved.config).task.budget_text, style),
    )


def asked(run, questions, budgets):
    """Returns the prompts of questions, as this package formats them.

    Args:
      budgets: budget of each question in tokens, or None for a prompt without budget.
    """
    saved, style, tokenizer, words = saved_policy(run)
    plain, _ = encode_prompts(tokenizer, questions, style, max_tokens=500)
    if not words:
        return plain
    waiting, _ = make_budget_prompts(
        tokenizer, questions, style, words, largest=999, max_tokens=500
    )
    told = np.array([NO_BUDGET if b is None else b for b in budgets], np.int32)
    return waiting.at(np.arange(len(questions)), told, plain)


def ours(run, questions, budgets):
    """Samples greedy responses with this package.

    Args:
      budgets: budget of each question in tokens, or None for no budget.

    Returns:
      The token ids of each response (thinking, forced tokens and answer), and the trunks of the
      rollout.
    """
    saved, style, tokenizer, _ = saved_policy(run)
    limits = np.array([cap(saved.config.budget) if b is None else b for b in budgets], np.int32)
    told = np.array([NO_BUDGET if b is None else b for b in budgets], np.int32)
    path = saved.config.model.path
    rows = reading.load_policy(path)[0].vocab_size if path else 27
    most = max(int(limits.max()), 1)
    decoder = open_decoder(saved, rows, max_thinking=most, slots=min(len(questions), 100))
    rollout = generate(
        decoder.params,
        asked(run, questions, budgets),
        RolloutRequest(told, limits[:, None], limits=limits),
        jax.random.key(0),
        SamplingSetup(
            decoder.spec, make_rules(tokenizer, style, rows), sampling_params(0.0), decoder.phi_of
        ),
    )
    trunks, branches = jax.tree.map(np.asarray, (rollout.trunks, rollout.branches))
    found = []
    for row, start in enumerate(trunks.prompt_lengths):
        thinking = trunks.tokens[row, start : branches.context[row, 0]].tolist()
        written = branches.forced[row, 0] + branches.sampled[row, 0]
        found.append(thinking + branches.tokens[row, 0, :written].tolist())
    return found, trunks


LEDGER = replace(export_world.LEDGER, hidden_size=32, head_dim=8, max_positions=128)


def ledger_run(tmp_path, told, seed=1, shape=LEDGER, quiet=False, **how):
    """Creates a run with a random policy for the ledger task, and exports the policy.

    Args:
      told: how the policy receives its budget, the value of `conditioning.budget_input`.
      quiet: True for logits and attention scores that are as small as in a trained policy, so that
        rounding changes the log-probabilities only slightly.
      how: further keys of the config section `conditioning`.

    Returns:
      The run folder and the folder of the export.
    """
    conditioning = ConditioningConfig(budget_input=told, **how)
    given = {"conditioning": conditioning} if conditioning.embeds else {}
    params = hf_world.random_params(shape, seed, **given)
    if quiet:
        embed = params["embed"]
        params = {**jax.tree.map(lambda x: 0.6 * x, params), "embed": 1.5 * embed}
    else:
        # Large logits have no ties, so that rounding does not change the greedy tokens.
        params["embed"] = params["embed"] * 3
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
    widths = {name: getattr(shape, name) for name in names}
    model = {**export_world.MODEL, **widths, "compute_dtype": "float32"}
    settings = {
        "model": model,
        "conditioning": {"budget_input": told, **how},
        "budget": {"min": 8, "max": 64, "levels": {"low": 16}},
        "rollout": {"answer_tokens": 5},
    }
    run = export_world.make_run(tmp_path / "run", params, settings)
    from_run.export(run, tmp_path / "out")
    return run, tmp_path / "out"


def ledger_questions():
    """Returns 20 questions of the ledger task."""
    from bacr_jax.questions.ledger import make_problems

    return [p.question for p in make_problems(0, 20, max_operand=3, split="test")]


QWEN = Qwen2Config(
    151_936, 32, 48, 4, 4, 2, 8, rope_theta=1e4, tie_embeddings=False, max_positions=2048
)


def writes_tags(tokenizer, params, seed=0):
    """Returns parameters whose greedy text contains the closing tags of thinking and answer.

    The text consists of few different tokens. `</` is followed by `think` or `answer`, which is
    followed by the token that ends the tag.

    Args:
      params: parameters that keep their values except for the embedding matrix and output head.
    """
    rng = np.random.default_rng(seed)
    one = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    opened, think, end = one("</think>\n")
    (answer,) = one("answer")
    words = rng.choice(20_000, 30, replace=False) + 1000
    embed = np.array(params["embed"])
    width = embed.shape[1]
    active = np.unique([*words, opened, think, answer, end, tokenizer.eos_token_id, *one("\n")])
    embed[active] = 2.0 * rng.standard_normal((len(active), width))
    head = np.zeros_like(embed)
    head[active] = 2.0 * rng.standard_normal((len(active), width))
    follow = [(opened, think), (opened, answer), (think, end), (answer, end)]
    for before, after in [*follow, *((word, opened) for word in words[:6])]:
        head[after] += 6.0 * embed[before] / np.linalg.norm(embed[before])
    return {**params, "embed": jax.numpy.asarray(embed), "lm_head": jax.numpy.asarray(head)}


def folder_run(tmp_path, tokens, shape, params, conditioning, **settings):
    """Creates a run that started from a Hugging Face folder, and exports its policy.

    Args:
      tokens: tokenizer of the folder.
      shape: sizes of the model.
      params: parameters of the policy after training.
      conditioning: config section `conditioning`, as a dict.
      settings: further sections of the config.

    Returns:
      The run folder and the folder of the export.
    """
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}
    policy_folder.save_policy(tmp_path / "base", plain, config=shape, tokenizer=tokens)
    settings = {
        "model": {"path": str(tmp_path / "base"), "compute_dtype": "float32"},
        "data": {"train": "math:somewhere"},
        "conditioning": conditioning,
        "budget": {"min": 8, "max": 64},
        "rollout": {"answer_tokens": 12},
        **settings,
    }
    run = export_world.make_run(tmp_path / "run", params, settings)
    from_run.export(run, tmp_path / "out")
    return run, tmp_path / "out"


def qwen_run(tmp_path, tokens, conditioning, *, shape=QWEN, **settings):
    """Creates and exports a run of a small policy that generates tags with Qwen's tokenizer.

    The policy has random weights. Arguments and results are as in `folder_run`.
    """
    how = ConditioningConfig(**conditioning)
    given = {"conditioning": how} if how.embeds else {}
    params = writes_tags(tokens, hf_world.random_params(shape, 3, **given))
    return folder_run(tmp_path, tokens, shape, params, conditioning, **settings)


def family_run(tmp_path, family, **widths):
    """Creates and exports a run of a random policy that receives its budget as an embedding.

    Args:
      family: key of `hf_world.FAMILIES`.
      widths: fields of the family's model shape with other values.

    Returns:
      The run folder and the folder of the export.
    """
    tokens = hf_world.chat_tokenizer()
    shape = replace(hf_world.FAMILIES[family], vocab_size=len(tokens), max_positions=512, **widths)
    told = {"budget_input": "embedding"}
    params = hf_world.random_params(shape, 1, conditioning=ConditioningConfig(**told))
    # Make attention scores and logits as small as in a trained policy, so that rounding errors
    # stay small.
    params = {**jax.tree.map(lambda x: 0.6 * x, params), "embed": 1.5 * params["embed"]}
    levels = {"min": 8, "max": 64, "levels": {"low": 16}}
    return folder_run(
        tmp_path, tokens, shape, params, told, budget=levels, rollout={"answer_tokens": 5}
    )


def math_questions(shared_data):
    """Returns the first 20 questions of MATH-500."""
    with (shared_data / "math500/test.jsonl").open() as file:
        return [json.loads(next(file))["problem"] for _ in range(20)]
