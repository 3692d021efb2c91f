"""Short prompts and traces of generators whose short answers are less accurate than long ones.

A trace opens with the mark of its style, and what follows its last `=` is the answer:

    at_once  =7         the answer alone
    steps    :...=7     worked out
    checks   ?...=7     worked out, every step shown in a way that can be checked

so that a small model, one token a character, has styles of different length to choose among.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Any  # question, answer, metadata
MARKS = {"at_once": "", "steps": ":", "checks": "?"}
STYLES = tuple(MARKS)
_OPENINGS = {"at_once": "", "steps": "Step by step:\n", "checks": "With checks:\n"}


@dataclass(frozen=True)
class Form:
    """A generator's short form.

    Attributes:
      prompt: what the question is about.
      work: (metadata, whether with checks) -> the steps.
      answer: of the metadata: a short way to write the answer that the scorer accepts; None: as it
        is.
    """

    prompt: Callable[[Row], str]
    work: Callable[[Row, bool], list[str]]
    answer: Callable[[Mapping[str, Any]], str] | None = None

    def trace(self, row: Row, style: str) -> str:
        """The trace of a row; see the module's docstring."""
        work = [] if style == "at_once" else self.work(row, style == "checks")
        return f"{MARKS[style]}{';'.join(work)}={row.answer}"


def in_words(trace: str, style: str) -> str:
    """A trace as a text for a model that was trained on language."""
    work, _, answer = trace.rpartition("=")
    steps = work.removeprefix(MARKS[style]).replace(";", "\n")
    return f"{_OPENINGS[style]}{steps}{steps and chr(10)}The answer is {answer}."


def _edges(row: Row) -> tuple[dict[str, str], str, str]:
    """Of a path-star graph: the node before each, start and goal; labels are of one width."""
    graph = row.question.rstrip().rpartition("\n")[2].removesuffix(" =")
    edges, _, ends = graph.partition("/")
    pairs = [edge.split() for edge in edges.split("|")[1:]]
    width = max(len(label) for pair in pairs for label in pair)
    first, last = (label.zfill(width) for label in ends.split())
    return {b.zfill(width): a.zfill(width) for a, b in pairs}, first, last


def _path_prompt(row: Row) -> str:
    """Every edge from its end, so that a walk back finds what follows a node."""
    before, first, last = _edges(row)
    return f"{','.join(f'{b}{a}' for b, a in before.items())}/{first}>{last}"


def _path_work(row: Row, checks: bool) -> list[str]:
    """Back from the goal, where every node has one edge into it; with checks edge by edge."""
    before, *ends = _edges(row)
    goal = ends[0] if int(ends[1]) == row.metadata["center"] else ends[1]
    nodes = [goal]
    while nodes[-1] in before:
        nodes.append(before[nodes[-1]])
    return [f"{b}{a}" for b, a in zip(nodes, nodes[1:])] if checks else ["".join(nodes)]


def _bits_work(row: Row, checks: bool) -> list[str]:
    """Halvings, with the ones so far."""
    n, ones, steps = row.metadata["number"], 0, []
    while n:
        ones += n % 2
        steps.append(f"{n}={n // 2}+{n // 2}+{n % 2},{ones}" if checks else f"{n},{ones}")
        n //= 2
    return steps


# The signs of gates, those beyond ASCII by others; the last gate is told by its sign.
_GATES = str.maketrans({"↑": "|", "⊕": "^", "↓": "-"})
_FINAL = {"OR": "+", "NOR": "-", "XOR": "^", "AND": "&"}


def _gate(sign: str, bits: list[int]) -> int:
    found = {"&": all(bits), "|": not all(bits), "^": sum(bits) % 2, "+": any(bits)}
    return int(found[sign] if sign in found else not any(bits))


def _circuit_prompt(row: Row) -> str:
    values = "".join(f"{name}{bit}" for name, bit in row.metadata["assignments"].items())
    final = _FINAL[row.metadata["final_gate"]]
    return f"{values}/{final.join(f'({t})' for t in row.metadata['term_strings'])}".translate(
        _GATES
    )


def _circuit_work(row: Row, checks: bool) -> list[str]:
    """Every term with its inputs' values, with checks as they enter the gate too; the last gate."""
    values, outs, steps = row.metadata["assignments"], [], []
    for term in row.metadata["term_strings"]:
        term = term.translate(_GATES)
        sign = next((c for c in term if c in "&|^"), "&")
        names = term.split(sign)
        plain = [name.rstrip("'") for name in names]
        bits = [values[p] ^ (p != name) for p, name in zip(plain, names)]
        outs.append(_gate(sign, bits))
        shown = sign.join(f"{p}{values[p]}{name[len(p) :]}" for p, name in zip(plain, names))
        entering = f":{sign.join(map(str, bits))}" if checks else ""
        steps.append(f"{shown}{entering}={outs[-1]}")
    return [*steps, _FINAL[row.metadata["final_gate"]].join(map(str, outs))]


def _gcd_work(row: Row, checks: bool) -> list[str]:
    """Euclid's remainders; of more than two numbers, one after the other."""
    found, *others = row.metadata["numbers"]
    steps = []
    for other in others:
        a, b, rest = found, other, [found, other]
        while b:
            if checks:
                steps.append(f"{a}={a // b}*{b}+{a % b}")
            a, b = b, a % b
            rest.append(b)
        found = a
        steps += [] if checks else [",".join(map(str, rest))]
    return steps


def _sum_work(row: Row, checks: bool) -> list[str]:
    """Running sums, with checks the way back too."""
    first, *rest = row.metadata["expression"].split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2]):
        new = total + int(term) if sign == "+" else total - int(term)
        back = f",{new}{'-' if sign == '+' else '+'}{term}={total}" if checks else ""
        steps.append(f"{total}{sign}{term}={new}{back}")
        total = new
    return steps


def _primes_work(row: Row, checks: bool) -> list[str]:
    """The primes, counted; with checks every odd number, and the least divisor of the others."""
    count = {prime: place for place, prime in enumerate(row.metadata["primes"], 1)}
    if not checks:
        return [f"{prime},{place}" for prime, place in count.items()]
    least = lambda n: next((d for d in range(3, n + 1, 2) if n % d == 0), 1)
    numbers = range(row.metadata["start"], row.metadata["end"] + 1)
    return [
        f"{n},{count[n]}" if n in count else f"{n}/{least(n)}"
        for n in numbers
        if n in count or n % 2
    ]


def _letters_work(row: Row, checks: bool) -> list[str]:
    """The count after each word, with checks beside the word."""
    letter, count, steps = row.metadata["target_letter"], 0, []
    for word in row.metadata["span"]:
        count += word.lower().count(letter)
        steps.append(f"{word},{count}" if checks else str(count))
    return steps if checks else [",".join(steps)]


def _sorting_answer(metadata: Mapping[str, Any]) -> str:
    return f"[{','.join(metadata['sorted_numbers'])}]"


def _sorting_work(row: Row, checks: bool) -> list[str]:
    """Insertions one by one, with checks the finished order as comparisons too."""
    falling = row.metadata["direction"] == "descending"
    sign, steps = ">" if falling else "<", []
    placed: list[str] = []
    for number in row.metadata["original_numbers"]:
        placed = sorted([*placed, number], key=float, reverse=falling)
        steps.append(",".join(placed))
    return [*steps, sign.join(placed)] if checks else steps


def _sorting_prompt(row: Row) -> str:
    sign = ">" if row.metadata["direction"] == "descending" else "<"
    return f"{sign}{','.join(row.metadata['original_numbers'])}"


SHORT = {
    "path_star": Form(_path_prompt, _path_work),
    "count_bits": Form(lambda row: str(row.metadata["number"]), _bits_work),
    "circuit_logic": Form(_circuit_prompt, _circuit_work),
    "gcd": Form(lambda row: ",".join(map(str, row.metadata["numbers"])), _gcd_work),
    "chain_sum": Form(lambda row: row.metadata["expression"].replace(" ", ""), _sum_work),
    "count_primes": Form(
        lambda row: f"{row.metadata['start']}..{row.metadata['end']}", _primes_work
    ),
    "letter_counting": Form(
        lambda row: f"{row.metadata['target_letter']}:{' '.join(row.metadata['span'])}",
        _letters_work,
    ),
    "number_sorting": Form(_sorting_prompt, _sorting_work, _sorting_answer),
}
