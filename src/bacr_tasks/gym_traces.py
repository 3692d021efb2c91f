"""Short prompts and traces for eight generators of reasoning-gym.

A small model that reads single characters learns styles of different length from them. In these
eight generators short answers are less accurate than long ones. `gym` calls `ShortForm.prompt`,
`ShortForm.trace` and `in_words`. A trace begins with the mark of its style and ends with the answer
after its last `=`:

    at_once  =7         only the answer
    steps    :...=7     steps
    checks   ?...=7     steps, each written so that it can be checked
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Any  # an object with question, answer, metadata
MARKS = {"at_once": "", "steps": ":", "checks": "?"}
STYLES = tuple(MARKS)
_OPENINGS = {"at_once": "", "steps": "Step by step:\n", "checks": "With checks:\n"}


@dataclass(frozen=True)
class ShortForm:
    """The short form of a generator's items.

    Attributes:
      prompt: returns the short prompt of a row.
      work: returns the steps of a row's solution; the second argument is True for steps that can be
        checked.
      answer: returns a shorter way to write the answer that the scorer accepts, from the item's
        metadata; None to keep the generator's answer.
    """

    prompt: Callable[[Row], str]
    work: Callable[[Row, bool], list[str]]
    answer: Callable[[Mapping[str, Any]], str] | None = None

    def trace(self, row: Row, style: str) -> str:
        """Returns the trace of a row in a style: mark, steps between semicolons, `=`, answer."""
        steps = []
        if style != "at_once":
            steps = self.work(row, style == "checks")
        return f"{MARKS[style]}{';'.join(steps)}={row.answer}"


def in_words(trace: str, style: str) -> str:
    """Rewrites a trace for a language model: an opening sentence, one step a line, the answer."""
    work, _, answer = trace.rpartition("=")
    steps = work.removeprefix(MARKS[style]).replace(";", "\n")
    if steps:
        steps += "\n"
    return f"{_OPENINGS[style]}{steps}The answer is {answer}."


@dataclass(frozen=True)
class _PathStar:
    """The graph of a path_star item, with labels padded to one width.

    Attributes:
      before: the node before each node, in the question's order.
      first, last: the two ends of the path; which of them is the start depends on the item.
    """

    before: dict[str, str]
    first: str
    last: str

    def edges_backwards(self) -> str:
        """Returns every edge as its end followed by its start, so that a path is read backwards."""
        return ",".join(f"{node}{before}" for node, before in self.before.items())


def _path_star(row: Row) -> _PathStar:
    """Reads the graph from the last line of a path_star question: `|a b|b c/a c =`."""
    last_line = row.question.rstrip().rpartition("\n")[2].removesuffix(" =")
    edges, _, ends = last_line.partition("/")
    pairs = [edge.split() for edge in edges.split("|")[1:]]
    # With one width, two labels in a row can be read in one way only.
    width = max(len(label) for pair in pairs for label in pair)
    before = {end.zfill(width): start.zfill(width) for start, end in pairs}
    first, last = (label.zfill(width) for label in ends.split())
    return _PathStar(before, first, last)


def _path_prompt(row: Row) -> str:
    """Returns the backward edges and the two ends."""
    graph = _path_star(row)
    return f"{graph.edges_backwards()}/{graph.first}>{graph.last}"


def _path_work(row: Row, checks: bool) -> list[str]:
    """Walks from the goal back to the center, since every node has one edge into it.

    The step is the list of nodes; with checks each edge is a step.
    """
    graph = _path_star(row)
    starts_at_center = int(graph.last) == row.metadata["center"]
    goal = graph.first if starts_at_center else graph.last
    nodes = [goal]
    while nodes[-1] in graph.before:
        nodes.append(graph.before[nodes[-1]])
    if not checks:
        return ["".join(nodes)]
    return [f"{node}{before}" for node, before in zip(nodes, nodes[1:])]


def _bits_prompt(row: Row) -> str:
    """Returns the number whose one bits are counted."""
    return str(row.metadata["number"])


def _bits_work(row: Row, checks: bool) -> list[str]:
    """Halves the number until it is 0; each step has the count of ones so far."""
    number = row.metadata["number"]
    ones = 0
    steps = []
    while number:
        half = number // 2
        bit = number % 2
        ones += bit
        if checks:
            steps.append(f"{number}={half}+{half}+{bit},{ones}")
        else:
            steps.append(f"{number},{ones}")
        number = half
    return steps


# ASCII signs for the generator's signs of NAND, XOR and NOR.
_GATES = str.maketrans({"↑": "|", "⊕": "^", "↓": "-"})
# The signs of the last gate.
_FINAL = {"OR": "+", "NOR": "-", "XOR": "^", "AND": "&"}


def _gate(sign: str, bits: Sequence[int]) -> int:
    """Computes the gate of a term by its ASCII sign: AND, NAND or XOR."""
    if sign == "^":
        return sum(bits) % 2
    output = all(bits)
    if sign == "|":
        output = not output
    return int(output)


def _circuit_prompt(row: Row) -> str:
    """Returns the inputs' values, then the terms between signs of the last gate."""
    assignments = row.metadata["assignments"]
    values = "".join(f"{name}{bit}" for name, bit in assignments.items())
    final_sign = _FINAL[row.metadata["final_gate"]]
    terms = final_sign.join(f"({term})" for term in row.metadata["term_strings"])
    return f"{values}/{terms}".translate(_GATES)


def _circuit_work(row: Row, checks: bool) -> list[str]:
    """Computes every term, then writes the terms' values between signs of the last gate.

    A step has each input's value after its name. With checks it also has the bits that enter the
    gate, which differ for inverted inputs (A').
    """
    values = row.metadata["assignments"]
    outputs = []
    steps = []
    for generator_term in row.metadata["term_strings"]:
        term = generator_term.translate(_GATES)
        # A term without a sign is one input, which & leaves as it is.
        sign = next((character for character in term if character in "&|^"), "&")
        inputs = []
        bits = []
        for operand in term.split(sign):
            name = operand.rstrip("'")
            inversion = operand[len(name) :]
            inputs.append(f"{name}{values[name]}{inversion}")
            bits.append(values[name] ^ (inversion != ""))
        output = _gate(sign, bits)
        outputs.append(str(output))
        entering = f":{sign.join(map(str, bits))}" if checks else ""
        steps.append(f"{sign.join(inputs)}{entering}={output}")
    final_sign = _FINAL[row.metadata["final_gate"]]
    steps.append(final_sign.join(outputs))
    return steps


def _gcd_prompt(row: Row) -> str:
    """Returns the numbers."""
    return ",".join(map(str, row.metadata["numbers"]))


def _gcd_work(row: Row, checks: bool) -> list[str]:
    """Writes Euclid's remainders, for the divisor so far and each further number.

    Without checks a step is the list of remainders; with checks each division is a step.
    """
    divisor, *others = row.metadata["numbers"]
    steps = []
    for other in others:
        a = divisor
        b = other
        remainders = [a, b]
        while b:
            quotient, remainder = divmod(a, b)
            if checks:
                steps.append(f"{a}={quotient}*{b}+{remainder}")
            remainders.append(remainder)
            a = b
            b = remainder
        divisor = a
        if not checks:
            steps.append(",".join(map(str, remainders)))
    return steps


def _sum_prompt(row: Row) -> str:
    """Returns the expression without blanks."""
    return row.metadata["expression"].replace(" ", "")


def _sum_work(row: Row, checks: bool) -> list[str]:
    """Adds the terms from left to right; with checks each step also has the inverse operation."""
    first, *rest = row.metadata["expression"].split()
    total = int(first)
    steps = []
    for sign, term in zip(rest[::2], rest[1::2]):
        is_sum = sign == "+"
        new_total = total + int(term) if is_sum else total - int(term)
        step = f"{total}{sign}{term}={new_total}"
        if checks:
            inverse = "-" if is_sum else "+"
            step += f",{new_total}{inverse}{term}={total}"
        steps.append(step)
        total = new_total
    return steps


def _primes_prompt(row: Row) -> str:
    """Returns the interval in which primes are counted."""
    return f"{row.metadata['start']}..{row.metadata['end']}"


def _primes_work(row: Row, checks: bool) -> list[str]:
    """Writes each prime with its count.

    With checks the odd numbers between have a step too, with their least divisor (1 for 1).
    """
    counts = {prime: count for count, prime in enumerate(row.metadata["primes"], 1)}
    if not checks:
        return [f"{prime},{count}" for prime, count in counts.items()]
    steps = []
    for number in range(row.metadata["start"], row.metadata["end"] + 1):
        if number in counts:
            steps.append(f"{number},{counts[number]}")
        elif number % 2:
            steps.append(f"{number}/{_least_odd_divisor(number)}")
    return steps


def _least_odd_divisor(number: int) -> int:
    """Returns the least odd divisor from 3 on, or 1 if there is none."""
    for divisor in range(3, number + 1, 2):
        if number % divisor == 0:
            return divisor
    return 1


def _letters_prompt(row: Row) -> str:
    """Returns the letter to count and the words."""
    words = " ".join(row.metadata["span"])
    return f"{row.metadata['target_letter']}:{words}"


def _letters_work(row: Row, checks: bool) -> list[str]:
    """Writes the count after each word; with checks each word is a step, with its count."""
    letter = row.metadata["target_letter"]
    count = 0
    counts = []
    steps = []
    for word in row.metadata["span"]:
        count += word.lower().count(letter)
        counts.append(str(count))
        steps.append(f"{word},{count}")
    return steps if checks else [",".join(counts)]


def _sorting_sign(row: Row) -> str:
    """Returns the comparison sign between neighbours of the sorted list."""
    return ">" if row.metadata["direction"] == "descending" else "<"


def _sorting_prompt(row: Row) -> str:
    """Returns the comparison sign and the numbers to sort."""
    numbers = ",".join(row.metadata["original_numbers"])
    return f"{_sorting_sign(row)}{numbers}"


def _sorting_work(row: Row, checks: bool) -> list[str]:
    """Inserts the numbers one by one; with checks the last step compares neighbours."""
    sign = _sorting_sign(row)
    sorted_numbers: list[str] = []
    steps = []
    for number in row.metadata["original_numbers"]:
        sorted_numbers = sorted([*sorted_numbers, number], key=float, reverse=sign == ">")
        steps.append(",".join(sorted_numbers))
    if checks:
        steps.append(sign.join(sorted_numbers))
    return steps


def _sorting_answer(metadata: Mapping[str, Any]) -> str:
    """Returns the sorted list without blanks and quotes."""
    return f"[{','.join(metadata['sorted_numbers'])}]"


SHORT = {
    "path_star": ShortForm(_path_prompt, _path_work),
    "count_bits": ShortForm(_bits_prompt, _bits_work),
    "circuit_logic": ShortForm(_circuit_prompt, _circuit_work),
    "gcd": ShortForm(_gcd_prompt, _gcd_work),
    "chain_sum": ShortForm(_sum_prompt, _sum_work),
    "count_primes": ShortForm(_primes_prompt, _primes_work),
    "letter_counting": ShortForm(_letters_prompt, _letters_work),
    "number_sorting": ShortForm(_sorting_prompt, _sorting_work, _sorting_answer),
}
