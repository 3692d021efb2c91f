"""A vLLM engine in this process computes the same as transformers and bacr_jax.

All of them load the same exported folder.
"""

import random

import interpreted_kernels
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm_world import engine_of

from bacr_vllm import cache_salt, generate_within

NAMES = ["shared", "per_layer", "response", "both", "prompt", "none", "qwen3", "llama", "qwen"]
# Number of tokens to compare, in general and for a large vocabulary, for which Triton's interpreter
# is slow.
NEW, NEW_OF_MANY = 10, 2


@pytest.fixture(scope="module", params=NAMES)
def served(request, world):
    """Yields a policy's name, its exported folder, and an engine.

    An engine step processes at most 48 tokens, so that prompts are split into chunks and a step
    contains several requests.
    """
    folder = world / request.param / "out"
    with engine_of(folder, max_num_batched_tokens=48) as llm:
        yield request.param, folder, llm


def transformers_model(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()


def reference_logprobs(model, prompt, ids, budget):
    """Returns log-probabilities [ids, V] of the next token, from the model code of the folder.

    There is one row for each token of `ids`, given the prompt and the preceding tokens.
    """
    whole, how = torch.tensor([prompt + ids]), {}
    module = getattr(model.config, "budget_module", None)
    if module is not None:
        how["budget"] = budget
        if budget is not None and module["positions"] == "response":
            how["budget_mask"] = (torch.arange(whole.shape[1]) >= len(prompt))[None]
    with torch.no_grad():
        logits = model(whole, **how).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def engine_logprobs(output, columns):
    """Returns the sampled token ids of an engine's output, and their log-probability rows.

    A row contains the log-probabilities of the token ids in `columns`.
    """
    rows = [[step[i].logprob for i in columns] for step in output.outputs[0].logprobs]
    return list(output.outputs[0].token_ids), torch.tensor(rows)


def greedy(llm, jobs, count=-1, new=NEW, **how):
    """Decodes (prompt, budget) pairs greedily in one batch, and returns the outputs."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=new,
            logprobs=count,
            ignore_eos=True,
            extra_args=None if budget is None else {"budget": budget},
            **how,
        )
        for _, budget in jobs
    ]
    return llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], params, use_tqdm=False)


@pytest.mark.parametrize("served", ["both", "none"], indirect=True)
def test_kernels_over_their_grid_give_what_triton_gives_one_by_one(served, monkeypatch):
    name, _, llm = served
    jobs = [([(3 * i + j) % 20 + 1 for j in range(5 + 3 * i)], i % 3 * 4) for i in range(12)]
    params = [
        SamplingParams(
            temperature=(0, 0.7, 1)[i % 3],
            seed=i,
            max_tokens=NEW,
            logprobs=2,
            extra_args={"budget": budget} if name == "both" else None,
        )
        for i, (_, budget) in enumerate(jobs)
    ]
    seen = []
    for kernels in (interpreted_kernels.WHOLE, {}):
        monkeypatch.setattr(interpreted_kernels, "WHOLE", kernels)
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        found = llm.generate(prompts, params, use_tqdm=False)
        seen.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found])
    assert seen[0] == seen[1]


def test_log_probabilities_are_those_of_transformers(served):
    name, folder, llm = served
    model = transformers_model(folder)
    size, ids = model.config.vocab_size, random.Random(0)
    # For a large vocabulary, compares only some token ids, because it is slow to return all
    # log-probabilities at every step.
    columns = list(range(size)) if size < 1000 else ids.sample(range(151_643), 100)
    few = {} if size < 1000 else {"logprob_token_ids": columns}
    some = list(range(6, 24)) if size < 1000 else range(151_643)
    prompts = [ids.choices(some, k=n) for n in ((60,) if few else (3, 9, 60))]
    levels = ["low"] if getattr(model.config, "budget_levels", None) else []
    jobs = [(prompt, b) for prompt in prompts for b in (0, 8, 64, None, *levels)]
    worst, said = {}, {}
    outputs = greedy(llm, jobs, None if few else -1, NEW_OF_MANY if few else NEW, **few)
    for (prompt, budget), output in zip(jobs, outputs):
        found, mine = engine_logprobs(output, columns)
        budget = 16 if budget == "low" else budget
        theirs = reference_logprobs(model, prompt, found, budget)[:, columns]
        worst[budget] = max(worst.get(budget, 0.0), (mine - theirs).abs().max().item())
        said.setdefault(len(prompt), []).append(mine[0])
        assert not set(found) & never_sampled(model.config.thinking)
    print(f"\n{name}: largest difference of log-probabilities {max(worst.values()):.1e}")
    assert max(worst.values()) < 1e-4
    if getattr(model.config, "budget_module", None) and not model_at_response(model):
        # The effect of the budget on the log-probabilities is much larger than the tolerance.
        assert all((rows[0] - rows[2]).abs().max() > 1e-2 for rows in said.values())


def model_at_response(model):
    return model.config.budget_module["positions"] == "response"


def never_sampled(thinking):
    from bacr_client.rules import numbers_in

    return set(numbers_in(thinking["never_sampled"]))


def test_the_cap_holds_as_in_bacr_jax_token_for_token(served, reference):
    name, _, llm = served
    rows = reference[name]
    found = generate_within(llm, [r["prompt"] for r in rows], [r["budget"] for r in rows])
    same = sum(list(one.tokens) == row["response"] for one, row in zip(found, rows))
    print(f"\n{name}: {same} of {len(rows)} rows equal")
    assert same == len(rows)
    # Checks that the comparison is meaningful: some thinking was truncated, and responses differ.
    assert {one.closed_by for one in found} >= {"budget"}
    assert len({one.tokens for one in found}) >= 4


def test_chats_and_levels_are_read_as_the_folder_writes_them(served, reference):
    name, _, llm = served
    if name == "qwen":
        pytest.skip("names no levels")
    rows = [row for row in reference[name] if row["budget"] == 16]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    found = generate_within(llm, chats, "low")
    assert [list(one.tokens) for one in found] == [row["response"] for row in rows]
    assert found[0].text == llm.get_tokenizer().decode(found[0].tokens)


def test_sampled_rows_hold_their_budgets_and_come_again_with_their_seed(served, reference):
    name, _, llm = served
    if name == "qwen":
        pytest.skip("minutes in an interpreter")
    prompt = reference[name][0]["prompt"]
    draw = lambda seed: generate_within(llm, [prompt] * 4, 8, temperature=1.0, seed=seed)
    one, again, other = draw(0), draw(0), draw(1)
    assert one == again and one != other and len({row.tokens for row in one}) > 1
    assert all(len(row.thinking) <= 8 for row in [*one, *other])


BAD = [-1, 8.5, 8.0, True, "8", "high", 2**31, 10**6, [8]]


def test_bad_budgets_are_refused_by_the_name_of_the_field(served):
    _, _, llm = served
    for bad in BAD:
        with pytest.raises(VLLMValidationError, match="budget: "):
            greedy(llm, [([7, 8], bad)])
        with pytest.raises(ValueError, match="budget: "):
            generate_within(llm, [[7, 8], [7, 8]], bad)
    for bad in (-1, 1.5, "3", True):
        params = SamplingParams(max_tokens=1, extra_args={"response_from": bad})
        with pytest.raises(VLLMValidationError, match="response_from is "):
            llm.generate([{"prompt_token_ids": [7]}], params, use_tqdm=False)


def long_prompt(llm):
    """Returns the block size of the KV cache, and a prompt that is longer than two blocks."""
    size = llm.llm_engine.vllm_config.cache_config.block_size
    return size, random.Random(1).choices(range(6, 24), k=2 * size + 5)


@pytest.mark.parametrize("name", ["shared", "response"])
def test_requests_with_equal_prompts_do_not_share_their_budgets(world, name, monkeypatch):
    folder = world / name / "out"
    model = transformers_model(folder)

    def difference(llm, prompt, budget):
        (output,) = greedy(llm, [(prompt, budget)])
        ids, mine = engine_logprobs(output, range(27))
        theirs = reference_logprobs(model, prompt, ids, budget)
        return (mine - theirs).abs().max().item(), output.num_cached_tokens

    with engine_of(folder, enable_prefix_caching=True, block_size=32) as llm:
        size, prompt = long_prompt(llm)
        for budget, cached in [(8, 0), (None, 0), (64, 0), (8, 2), (None, 2), (64, 2)]:
            worst, found = difference(llm, prompt, budget)
            assert worst < 1e-4 and found == cached * size
        if name == "shared":
            # Without the cache salt, requests with different budgets share cached prefixes. This
            # shows that the test detects such a leak.
            monkeypatch.setattr(cache_salt, "budget_salt", lambda request: "")
            other = prompt[1:]
            assert difference(llm, other, 8)[0] < 1e-4
            worst, found = difference(llm, other, 64)
            assert worst > 1e-3 and found > 0
