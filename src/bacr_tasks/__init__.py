"""Questions of other packages as sources, with prompts and traces of ours for eight generators.

Each module makes what a source file of one's own is: an object with `questions(split)`, rows as
mappings, and perhaps `render(row)`, `trace(row, style)`, `STYLES`; `SCORE` is the file whose
`score(answer, row)` is asked, in processes that can be killed. What can't be is a ValueError of one
line.
"""
