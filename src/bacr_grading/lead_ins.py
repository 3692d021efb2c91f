"""Sentences around an answer that an instructed model writes, and that say nothing themselves."""

import re

_SUBJECT = r"""
    (?:(?:the|my|our)\s)?(?:(?:final|correct)\s)?(?:answer|result|solution)
    (?:\s(?:to|of|for)\s(?:the|this)\s(?:question|problem))?
"""
_CONNECTIVE = r"(?:so|thus|hence|therefore|finally|in\sconclusion),?\s"
_VERB = r"(?:\s?is\s?(?:equal\sto|:|=)?|\sequals|\s?[:=])"
_LEAD_IN = re.compile(
    rf"""
    (?:\\text\{{\s?)?(?:\*\*|\#+\s)?
    (?:final\sanswer(?:\*\*)?:(?:\*\*)?\s(?=the\sfinal\sanswer))?
    (?: (?:{_CONNECTIVE})?{_SUBJECT}(?:\*\*)?{_VERB}
      | {_SUBJECT}(?=\s?(?:\$|\\\(|\\\[))
      | (?:so|thus|hence|therefore),?(?=\s) )
    (?:\*\*)?\s?(?P<close>\}})?\s?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LEAD_OUT = re.compile(
    r"(?:\s?is (?:the|our|my) (?:final )?answer|[.]\s?I hope (?:it|this) is correct)[.]?\Z",
    re.IGNORECASE,
)
_FIRST = frozenset("*#\\aAfFhHiImMoOrRsStT")
# The longest of the endings has fewer characters.
_LAST = 40


def without_lead_in(answer: str) -> str:
    """Takes a fixed sentence from around an answer: "The final answer is 42." is "42.".

    Only whole phrases of one fixed form go, once, and only from the start and the end, so that
    whatever else the text (some thousand characters at most) says is still there to be compared.
    """
    if answer[:1] not in _FIRST and not answer[-1:].isalpha() and answer[-1:] != ".":
        return answer
    text = " ".join(answer.split())
    match = _LEAD_IN.match(text) if text[:1] in _FIRST else None
    rest = text[match.end() :] if match else text
    if match and match.group().startswith("\\text") != bool(match["close"]):
        return answer
    ending = _LEAD_OUT.search(rest, max(len(rest) - _LAST, 0))
    rest = rest[: ending.start()] if ending else rest
    if match and "**" in match.group() and rest.endswith("**") and rest.count("**") == 1:
        rest = rest[:-2]
    changed = (match or ending) and rest.strip()
    return rest.strip() if changed else answer
