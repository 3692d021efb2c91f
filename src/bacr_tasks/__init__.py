"""Loads questions from the packages reasoning-gym (`gym`) and verifiers (`verifiers_v1`).

The package also contains short prompts and solution traces for eight generators of reasoning-gym
(`gym_traces`).

Each of the modules `gym` and `verifiers_v1` has a function `source(spec)`. It returns an object
with the same interface as a source file that a user writes:

* `questions(split)` returns the questions as rows, which are mappings.
* `render(row)`, `trace(row, style)` and `STYLES` are optional. They give the prompt of a row, a
  worked solution in a given style, and the names of the styles.
* `SCORE` is the path of a script with a function `score(answer, row)`, which runs in worker
  processes that can be killed.

If a source can't be used, `source` or `questions` raises a ValueError with a one-line message.
"""
