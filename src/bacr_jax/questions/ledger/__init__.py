"""Defines the mod-10 ledger, a procedural task that a model of 130k parameters learns in minutes.

A question is a start digit and n labelled additions modulo 10, so the answer is one digit:
`4a2b3c1` means 4 + 2 + 3 + 1 = 10, answer 0. The difficulty level, 1 to 5, is n. A guess is correct
with probability 10 %.

A trace (the text of the thinking) computes the answer in one of these styles:

    steps     a4+2=6b6+3=9c9+1=0                    6n tokens
    redo      a4+2=64+2=6b6+3=96+3=9c9+1=09+1=0     11n tokens, every sum written twice
    mixed     each line twice with probability 1/2  6n + 5k tokens for k repeated lines
    at_once   4231=0                                n + 3 tokens

The supervised warm-up before RL teaches some of these styles. Two variants of the task differ only
in these styles. `redundant` teaches mostly useless work, which RL with budgets should remove.
`tradeoff` teaches *steps* and *at_once*. A small model is less accurate with the short style
(*at_once*), so the best style depends on the budget.

Level n has 10 x max_operand^n distinct problems. A fixed fifth of each level is held out. The split
depends on a hash of the problem and not on the seed, so no run trains on a problem on which another
run is evaluated. Problems repeat if a level has fewer distinct problems than its share (level 1
holds out 6 of 30 problems with operands up to 3).
"""

from bacr_jax.questions.ledger.problems import (
    MAX_LEVEL as MAX_LEVEL,
    Problem as Problem,
    make_problems as make_problems,
    problem_of as problem_of,
    split_codes as split_codes,
)
from bacr_jax.questions.ledger.styles import (
    Style as Style,
    example as example,
    padded as padded,
    render as render,
)
from bacr_jax.questions.ledger.supervised import (
    PRACTICE as PRACTICE,
    WARMUP as WARMUP,
    short_traces as short_traces,
    warmup_batch as warmup_batch,
)
from bacr_jax.questions.ledger.tokenizer import (
    ID as ID,
    VOCABULARY as VOCABULARY,
    ledger_tokenizer as ledger_tokenizer,
)
