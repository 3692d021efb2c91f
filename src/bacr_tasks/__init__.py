"""Question sets of other packages, with short prompts and traces for eight of their generators.

Each source module has a function `source(spec)`. Its result has the same attributes as a user's
source file: `questions(split)` returns rows as mappings, and `render(row)`, `trace(row, style)` and
`STYLES` are optional. `SCORE` is the path of a script, whose `score(answer, row)` grades answers in
processes that can be killed. A source that can't be used raises a ValueError of one line.
"""
