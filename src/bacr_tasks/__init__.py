"""Questions of other packages as sources, with prompts and traces of ours for eight generators.

Each module returns the functions of a user's source file: `questions(split)` with rows as mappings,
and perhaps `render(row)`, `trace(row, style)` and `STYLES`. `SCORE` is the file whose
`score(answer, row)` is called, in processes that can be killed. Input that can't be used is a
ValueError of one line.
"""
