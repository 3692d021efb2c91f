"""Recomputes every number of docs/paper.md, and what other pages quote from the paper's tables.

The constants are copied from the paper. Everything else is computed from them or by the library.
"""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from bacr_jax import curriculum
from bacr_jax.config import ConditioningConfig, OptimizerConfig
from bacr_jax.config.io import schema
from bacr_jax.learner import optimizer
from bacr_jax.methods.bacr_settings import PUBLISHED
from bacr_jax.model import budget, sizes, value
from bacr_jax.questions.groups import groups_from_solve_rate

ROOT = Path(__file__).parents[2]

# Table 1: accuracy in % on MATH and on GSM8K, each at 512, 1024, 2048 and 4096 tokens.
TABLE_1 = {
    "Standard CoT": (38.1, 45.3, 52.6, 58.4, 72.3, 79.1, 84.5, 87.2),
    "Self-Consistency": (41.5, 49.7, 57.8, 63.1, 76.8, 83.4, 88.1, 90.6),
    "GRPO": (44.2, 53.6, 62.4, 68.7, 80.5, 86.2, 89.8, 91.4),
    "DAPO": (45.1, 54.8, 63.2, 69.3, 81.2, 87.0, 90.3, 91.8),
    "SelfBudgeter": (47.3, 56.1, 64.5, 68.9, 83.7, 88.4, 90.8, 91.2),
    "HAPO": (49.8, 57.4, 63.8, 67.5, 85.1, 88.9, 90.1, 90.5),
    "AnytimeReasoner": (48.6, 58.2, 66.3, 70.1, 85.6, 89.7, 91.2, 92.0),
    "BACR": (52.7, 61.5, 68.9, 71.8, 91.5, 92.8, 93.4, 93.6),
}
# Table 2: AIME 2024 at 1024, 2048 and 4096 tokens, average tokens; the same for Minerva Math.
TABLE_2 = {
    "GRPO": (4.2, 12.5, 20.8, 3842, 35.6, 44.2, 52.8, 3567),
    "DAPO": (4.2, 12.5, 25.0, 3791, 37.4, 46.0, 54.2, 3489),
    "SelfBudgeter": (4.2, 16.7, 25.0, 2856, 39.8, 48.6, 53.4, 2734),
    "AnytimeReasoner": (8.3, 20.8, 25.0, 2643, 42.2, 51.4, 56.0, 2518),
    "BACR": (16.7, 25.0, 33.3, 2187, 46.8, 56.8, 60.4, 2245),
}
UNDERLINED_AT_4096 = ("AnytimeReasoner",)
# Table 3: accuracy on MATH at 1024 tokens by the parts that are on.
TABLE_3 = {
    "": 58.2,
    "BUP": 59.8,
    "BUP CAS": 60.4,
    "BUP TDR": 60.1,
    "BUP BCAE": 60.6,
    "BUP CAS TDR": 61.0,
    "BUP CAS BCAE": 61.2,
    "BUP CAS TDR BCAE": 61.5,
}
# Text of section 4: gains over AnytimeReasoner on levels 1 to 5, loss of lambda = 0, steps.
GAIN_OF_LEVEL = (2.1, 2.1, 4.2, 5.1, 3.8)
LOSS_WITHOUT_LAMBDA = 1.2
STEPS, PROBLEMS, EPOCHS = 15_000, 7_500, 3
PEAK_EPOCH = 1.5
FIRST_BUDGET = 1500
SCHEDULE = {"alpha": 0.6, "beta": 0.3, "b_min": 256, "b_max": 4096}
G, M = 8, 4
RATE, ENTROPY = 1e-6, 0.01
WIDTH = 4096
AIME, MINERVA = 24, 500
# Not from the paper: problems per level in MATH-500, and the sizes of the two sets.
MATH_500 = (43, 90, 105, 128, 134)
AIME_2024, MINERVA_MATH = 30, 272

# Names, references to the paper, and code, whose numbers are no figures.
NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\((?:[3-5]\.\d)\)|(?:Eq\.|Fig\.|Tables?|Algorithm|Proposition) \d+\w?"
    r"|Qwen2\.5-7B|GSM8K|MATH-500|AIME 2024|pass@8|W2"
)
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d[\w.,]*")


def page(name):
    return " ".join((ROOT / "docs" / name).read_text().split())


def short(number, digits=1):
    """A number without the zero before its point."""
    return f"{number:.{digits}f}".removeprefix("0")


def default(key):
    return schema()[key].value


def second_best(table, column):
    return sorted((row[column], name) for name, row in table.items() if name != "BACR")[-1]


def lead(column, method="AnytimeReasoner"):
    return TABLE_1["BACR"][column] - TABLE_1[method][column]


def parameters(sharing):
    model = sizes.preset("qwen2.5-7b")
    shapes = jax.eval_shape(
        lambda key: budget.init(
            key,
            ConditioningConfig(sharing=sharing),
            width=model.hidden_size,
            layers=model.num_layers,
        ),
        jax.random.key(0),
    )
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def locations(rates):
    mean = jax.jit(functools.partial(curriculum.budget_mean, **SCHEDULE))
    return [round(mu) for mu in mean(np.float32(rates), float(FIRST_BUDGET)).tolist()]


def entropy_coefficients(pretrained):
    """Of the shipped configs that train a pretrained model, or one from scratch."""
    coefficients = set()
    for path in (ROOT / "configs").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        if ("path" in config.get("model", {})) == pretrained:
            coefficients.add(config["loss"]["entropy_coef"])
    return coefficients


def largest_move(num_updates):
    """Sum of the rates of all updates, since an Adam step moves a weight by about its rate."""
    schedule = jax.jit(optimizer.schedule(OptimizerConfig(), num_updates))
    rates = schedule(np.arange(num_updates))
    return RATE * float(np.sum(rates))


@functools.cache
def choices():
    at_half, _ = locations([0.5, 1.0])
    (entropy,), (from_scratch,) = entropy_coefficients(True), entropy_coefficients(False)
    features = value.num_features(WIDTH, conditioned=True, kind="cut")
    steps = -(-EPOCHS * (PROBLEMS - default("eval.holdout")) // default("rollout.questions"))
    num_updates = steps * default("train.minibatches")
    assert default("optimizer.conditioning_learning_rate") == 1e-4
    assert default("value.learning_rate") == 1e-3
    assert round(largest_move(num_updates), 5) == 3.7e-4
    return (
        '"2d² + d per layer"',
        f"{parameters('shared') / 1e6:.0f}M instead of {parameters('per_layer') / 1e6:.0f}M",
        "at 7B",
        "one learning rate, 1e-6",
        "phi and gates have 1e-4, the value head 1e-3",
        f"{num_updates} Adam steps of 1e-6",
        "more than about 3.7e-4",
        f"{default('curriculum.mu0'):.0f} and {default('curriculum.sigma'):.0f} tokens",
        f"near {FIRST_BUDGET}, and Eq. 5 at a pass rate of 1/2 at {at_half}",
        f"{default('curriculum.weight_epsilon')} is added, because",
        f"twice in {EPOCHS} epochs",
        f"updated every {default('curriculum.update_every')} steps",
        "b/4, b/2, 3b/4 and b, or sampled",
        f"even in `bacr-paper`, {features - 2 * WIDTH} sinusoids of each budget's logarithm",
        f"{default('value.hidden_size')} SiLU units",
        f"the batch, at least {default('advantage.floor')}.",
        f"is {short(ENTROPY, 2)} | {short(default('loss.entropy_coef'), 2)}, but {entropy:.0f} for "
        f"pretrained models and {short(from_scratch, 2)} from scratch",
        f"{default('rollout.questions')} questions, {default('train.minibatches')} minibatches, "
        f"{default('optimizer.warmup_steps')} updates, {default('optimizer.grad_clip')} |",
    )


@functools.cache
def contradictions():
    ours, grpo, anytime = TABLE_1["BACR"], TABLE_1["GRPO"], TABLE_1["AnytimeReasoner"]
    best, name = second_best(TABLE_1, 0)
    assert name == "HAPO"
    at_4096 = second_best(TABLE_2, 2)[0]
    tied = [method for method, row in TABLE_2.items() if row[2] == at_4096]
    assert len(tied) == 3 and len(UNDERLINED_AT_4096) == 1
    mean_gain = np.average(GAIN_OF_LEVEL, weights=MATH_500)
    without_dense = TABLE_3["BUP CAS TDR BCAE"] - TABLE_3["BUP CAS BCAE"]
    questions = PROBLEMS * EPOCHS / STEPS
    # Eq. 5 is the location from the second epoch on, and at a pass rate of 1 the lowest.
    _, lowest = locations([0.5, 1.0])
    assert groups_from_solve_rate(np.array([0.25, 0.5, 0.75, 1.0]), num_groups=4).tolist() == [
        *(3, 2, 1, 0)
    ]
    return (
        f'{ours[1]} at 1,024 tokens "surpasses" GRPO\'s {grpo[2]} at 2,048 and "nearly matches" '
        f"AnytimeReasoner's {anytime[2]}. It is {short(grpo[2] - ours[1])} and "
        f"{short(anytime[2] - ours[1])} below.",
        f"At 512 tokens of MATH it is HAPO ({best}), not AnytimeReasoner ({anytime[0]}), so the "
        f"lead is {lead(0, 'HAPO'):.1f}, not {lead(0):.1f} (Table 1). At 4,096 tokens of AIME "
        f"three methods have {at_4096}, and one",
        f"costs {LOSS_WITHOUT_LAMBDA} points in Fig. 4, and {short(without_dense)} in Table 3",
        f"by MATH-500's levels, average {mean_gain:.1f}. Table 1 has {lead(1):.1f}.",
        f"{STEPS:,} steps in {EPOCHS} epochs of {PROBLEMS:,} problems are {questions} questions",
        f"1 + M/G = {1 + M / G} times GRPO's",
        f"But M = {M} answers a trace",
        f"around {lowest} tokens at pass rate 1",
        f"A weight peaks at epoch {PEAK_EPOCH}",
        f'd = {WIDTH} "matching" Qwen2.5-7B, which has {sizes.preset("qwen2.5-7b").hidden_size}.',
        "thresholds of .25, .5 and .75 need",
        f"AIME 2024 has {AIME_2024} problems, not {AIME}. Minerva Math has {MINERVA_MATH}, not "
        f"{MINERVA}.",
    )


def unsupported(text):
    """Computed phrases that are missing from the text, and numbers that no phrase computes."""
    phrases = [*choices(), *contradictions()]
    missing = [phrase for phrase in phrases if phrase not in text]
    for phrase in sorted(phrases, key=len, reverse=True):
        text = text.replace(phrase, " ")
    numbers = {number.rstrip(".,") for number in NUMBER.findall(NAMES.sub(" ", text))}
    # Zero and one are the limits of pass rates, gates and values, not figures.
    return missing + sorted(numbers - {"0", "1"})


def test_every_number_of_the_page_is_recomputed():
    assert unsupported(page("paper.md")) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("62.4", "62.5"),
        ("average 3.8", "average 3.7"),
        ("26M", "27M"),
        ("1664", "1500"),
        ("All figures", "All 6 figures"),
        ("a prefix baseline.", "a prefix baseline worth 2.5 points."),
    ],
)
def test_a_wrong_number_and_a_number_without_a_source_are_found(right, wrong):
    text = page("paper.md")
    assert right in text and unsupported(text.replace(right, wrong)) != []


def gains_of_parts():
    base = TABLE_3["BUP"]
    parts = [TABLE_3[f"BUP {part}"] - base for part in ("CAS", "TDR", "BCAE")]
    return base - TABLE_3[""] + sum(parts), TABLE_3["BUP CAS TDR BCAE"] - TABLE_3[""], parts[-1]


def test_the_page_of_results_quotes_the_tables_of_the_paper():
    text = page("results.md")
    single, joint, of_bcae = gains_of_parts()
    # The lead over AnytimeReasoner on AIME is two of 24 problems at both ends.
    solved = {name: [round(x * AIME / 100) for x in row[:3]] for name, row in TABLE_2.items()}
    ahead = np.subtract(solved["BACR"], solved["AnytimeReasoner"])
    assert ahead[0] == ahead[2] == 2
    largest = max(lead(column) for column in range(8))
    claimed = TABLE_3["BUP BCAE"] - TABLE_3[""]
    phrases = (
        f"only for AIME, by two problems of {AIME}; Table 1 has at most {largest:.1f}",
        f"the paper's own table ({single:.1f} and {joint:.1f})",
        f"BCAE {claimed:.1f} points to BUP (4.3, Table 3)",
        f"In Table 3 BCAE adds {short(of_bcae)}",
        f"The paper's own {TABLE_1['BACR'][1]} is below GRPO's {TABLE_1['GRPO'][2]}",
    )
    assert [phrase for phrase in phrases if phrase not in text] == []
    loss = short(TABLE_3["BUP CAS TDR BCAE"] - TABLE_3["BUP CAS BCAE"])
    phrase = f"{LOSS_WITHOUT_LAMBDA} points less ({loss} in its Table 3)"
    assert phrase in page("studies/sensitivity.md")


def test_table_2_has_no_saving_of_34_percent_of_tokens():
    saved = [
        round(100 * (1 - TABLE_2["BACR"][column] / row[column]))
        for name, row in TABLE_2.items()
        if name != "BACR"
        for column in (3, 7)
    ]
    assert len(saved) == 8 and 34 not in saved
    assert "Table 2 has no 34" in page("results.md")


def test_percentages_of_aime_are_of_24_problems():
    for row in TABLE_2.values():
        for percent in row[:3]:
            solved = round(percent * AIME / 100)
            assert round(100 * solved / AIME, 1) == percent
    # The sizes of the public sets, as the page of data sets has them.
    data = page("data.md")
    assert f"| `aime24` | {AIME_2024} |" in data and f"| `minerva_math` | {MINERVA_MATH} |" in data


def test_the_page_names_every_published_setting_that_the_defaults_change():
    spans = re.findall(r"`([^`]+)`", page("paper.md"))
    named = {span.partition("=")[0].rpartition(".")[2] for span in spans}
    changed = [key for key, published in PUBLISHED.items() if default(key) != published.value]
    assert len(changed) > 10
    assert [key for key in changed if key.rpartition(".")[2] not in named] == []


def test_the_location_is_the_first_one_until_the_first_update():
    state = curriculum.init_curriculum(2, mu0=FIRST_BUDGET)
    mean = jax.jit(functools.partial(curriculum.scheduled_mean, **SCHEDULE))
    assert mean(state).tolist() == [FIRST_BUDGET] * 2
    update = jax.jit(functools.partial(curriculum.update_pass_rates, source="epoch"))
    assert np.round(mean(update(state))).tolist() == locations([0.5] * 2)
    assert r"it is $\mu_k(0)$" in page("equations.md")
