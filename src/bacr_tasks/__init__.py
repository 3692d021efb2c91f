"""Loads questions from the packages reasoning-gym (`gym`) and verifiers (`verifiers_v1`).

For eight generators of reasoning-gym, `gym_traces` also writes short prompts and solution traces.

The modules `gym` and `verifiers_v1` each have a function `source(spec)`. The result has the same
interface as a Python file with which users define their own questions:

* `questions(split)` returns the questions as rows, which are mappings.
* `render(row)`, `trace(row, style)` and `STYLES` are optional: the prompt of a row, a worked
  solution in a given style, and the names of the styles.
* `SCORE` is the path of a script with a function `score(answer, row)`, which runs in worker
  processes that can be killed. If the module's `OF_RESPONSE` is True, the function receives the
  whole response instead of the answer.

If a source can't be used, `source` or `questions` raises a ValueError with a one-line message.
"""
