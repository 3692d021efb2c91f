"""Question sets from other packages, and short prompts and traces for eight generators.

Questions come from reasoning-gym (`gym`) and verifiers (`verifiers_v1`). The short prompts and
traces are for generators of reasoning-gym.

Each source module has a function `source(spec)`. Its result has the same interface as a user's
source file: `questions(split)` returns rows as mappings, and `render(row)`, `trace(row, style)` and
`STYLES` are optional. `SCORE` is the path of a script with a function `score(answer, row)`, which
runs in worker processes that can be killed. If a source cannot be used, it raises a ValueError with
a one-line message.
"""
