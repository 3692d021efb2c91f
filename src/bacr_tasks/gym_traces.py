"""Writes short prompts and solution traces for eight generators of reasoning-gym.

They are written for a small model whose tokens are single characters. The model learns to solve
problems in three styles with solutions of different lengths. For these eight generators, such a
model is less accurate with short solutions than with long solutions. `gym` calls
`ShortForm.prompt`, `ShortForm.trace` and `in_words`. A trace begins with the marker of its style
and ends with the answer, after the last `=`:

    at_once  =7         only the answer
    steps    :...=7     intermediate steps
    checks   ?...=7     intermediate steps in a form that can be verified
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Any  # An object with the attributes question, answer and metadata.
# First characters of a trace, by style.
MARKS = {"at_once": "", "steps": ":", "checks": "?"}
STYLES = tuple(MARKS)
# Opening sentence of a trace for a language model, by style.
_OPENINGS = {"at_once": "", "steps": "Step by step:\n", "checks": "With checks:\n"}


@dataclass(frozen=True)
class ShortForm:
    """The functions that write short prompts and solution traces for one generator.

    A row is one item of the generator, with its question, answer and metadata.

    Attributes:
      prompt: returns the short prompt of a row.
      work: returns the solution steps of a row. If the second argument is True, the steps are
        written so that they can be verified.
      answer: returns the answer in a shorter format, which the scorer also accepts, given the row's
        metadata. None to use the generator's answer.
      minimums: minimum values of fields of the generator's config. With smaller values, a short
        prompt does not determine its answer.
    """

    prompt: Callable[[Row], str]
    work: Callable[[Row, bool], list[str]]
    answer: Callable[[Mapping[str, Any]], str] | None = None
    minimums: Mapping[str, int] = field(default_factory=dict)

    def check_fields(self, where: str, fields: Mapping[str, Any]) -> None:
        """Checks the fields of a generator's config for short prompts.

        Args:
          where: the full spec, including `gym:`. Error messages begin with it.

        Raises:
          ValueError: if a value is too small.
        """
        for name, minimum in self.minimums.items():
            value = fields.get(name, minimum)
            if value < minimum:
                raise ValueError(
                    f"{where}: with data.prompt_format=characters, the field {name!r} can't be "
                    f"{value}, because short prompts then do not determine their answers; use "
                    f"{minimum} or more"
                )

    def trace(self, row: Row, style: str) -> str:
        """Returns the solution trace of a row in a given style.

        The trace consists of the style's marker, the steps separated by semicolons, `=` and the
        answer.

        Args:
          row: one item, with its question, answer and metadata.
          style: `at_once` (no steps), `steps`, or `checks` (steps that can be verified).
        """
        steps = []
        if style != "at_once":
            steps = self.work(row, style == "checks")
        return f"{MARKS[style]}{';'.join(steps)}={row.answer}"


def in_words(trace: str, style: str) -> str:
    """Rewrites a solution trace for a pretrained language model.

    The result consists of an opening sentence, one step per line, and a sentence with the answer.
    For the style `at_once`, it contains only the sentence with the answer.
    """
    work, _, answer = trace.rpartition("=")
    steps = work.removeprefix(MARKS[style]).replace(";", "\n")
    if steps:
        steps += "\n"
    return f"{_OPENINGS[style]}{steps}The answer is {answer}."


@dataclass(frozen=True)
class _PathStar:
    """The graph of a path_star item. Its labels are padded with zeros to the same width.

    Attributes:
      before: dict from each node to its predecessor, in the order of the question's edges.
      first, last: the two ends of the path. Depending on the item, either can be the start.
    """

    before: dict[str, str]
    first: str
    last: str

    def edges_backwards(self) -> str:
        """Returns all edges reversed, because the solution follows the path backwards."""
        return ",".join(f"{node}{before}" for node, before in self.before.items())


def _path_star(row: Row) -> _PathStar:
    """Parses the graph from the last line of a path_star question, such as `|a b|b c/a c =`."""
    last_line = row.question.rstrip().rpartition("\n")[2].removesuffix(" =")
    edges, _, ends = last_line.partition("/")
    pairs = [edge.split() for edge in edges.split("|")[1:]]
    # Labels have the same width, because they are written without a separator.
    width = max(len(label) for pair in pairs for label in pair)
    before = {end.zfill(width): start.zfill(width) for start, end in pairs}
    first, last = (label.zfill(width) for label in ends.split())
    return _PathStar(before, first, last)


def _path_prompt(row: Row) -> str:
    """Writes a path_star prompt: the reversed edges and the two ends of the path."""
    graph = _path_star(row)
    return f"{graph.edges_backwards()}/{graph.first}>{graph.last}"


def _path_work(row: Row, checks: bool) -> list[str]:
    """Solves a path_star item by following the path backwards from the goal to the center.

    Backwards, the path is unique, because every node has at most one incoming edge. Without
    `checks`, the only step is the list of nodes. With `checks`, each edge is a step.
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
    """Writes a count_bits prompt: the number whose 1 bits are counted."""
    return str(row.metadata["number"])


def _bits_work(row: Row, checks: bool) -> list[str]:
    """Solves a count_bits item by halving the number until it is 0.

    Each step contains the number of 1 bits so far. With `checks`, each step also contains the
    number as half + half + bit.
    """
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


# ASCII replacements of the generator's symbols for NAND, XOR and NOR.
_GATES = str.maketrans({"↑": "|", "⊕": "^", "↓": "-"})
# Symbols of the final gate.
_FINAL = {"OR": "+", "NOR": "-", "XOR": "^", "AND": "&"}


def _gate(sign: str, bits: Sequence[int]) -> int:
    """Returns the output of an AND, NAND or XOR gate with the given ASCII symbol and input bits."""
    if sign == "^":
        return sum(bits) % 2
    output = all(bits)
    if sign == "|":
        output = not output
    return int(output)


def _circuit_prompt(row: Row) -> str:
    """Writes a circuit_logic prompt: the input values, then the terms joined by the final gate."""
    assignments = row.metadata["assignments"]
    values = "".join(f"{name}{bit}" for name, bit in assignments.items())
    final_sign = _FINAL[row.metadata["final_gate"]]
    terms = final_sign.join(f"({term})" for term in row.metadata["term_strings"])
    return f"{values}/{terms}".translate(_GATES)


def _circuit_work(row: Row, checks: bool) -> list[str]:
    """Solves a circuit_logic item: computes every term and joins the results with the final gate.

    Each step contains the names of the inputs, each followed by its value. With `checks`, it also
    contains the bits that enter the gate, which differ from the values of inverted inputs (A').
    """
    values = row.metadata["assignments"]
    outputs = []
    steps = []
    for generator_term in row.metadata["term_strings"]:
        term = generator_term.translate(_GATES)
        # A term without an operator has a single input. AND with one input returns the input
        # unchanged.
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
    """Writes a gcd prompt: the numbers, separated by commas."""
    return ",".join(map(str, row.metadata["numbers"]))


def _gcd_work(row: Row, checks: bool) -> list[str]:
    """Solves a gcd item with Euclid's algorithm.

    The algorithm is applied to the greatest common divisor so far and each further number. Without
    `checks`, each step is a list of remainders. With `checks`, each division is a step.
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
    """Writes a chain_sum prompt: the expression without spaces."""
    return row.metadata["expression"].replace(" ", "")


def _sum_work(row: Row, checks: bool) -> list[str]:
    """Solves a chain_sum item by adding the terms from left to right.

    With `checks`, each step also contains the inverse operation.
    """
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
    """Writes a count_primes prompt: the interval in which primes are counted, such as `3..20`."""
    return f"{row.metadata['start']}..{row.metadata['end']}"


def _primes_work(row: Row, checks: bool) -> list[str]:
    """Solves a count_primes item by listing the primes, each with the number of primes so far.

    With `checks`, the other odd numbers are listed too, each with its smallest divisor above 1 (1
    for the number 1).
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
    """Returns the smallest divisor above 1 of an odd number, or 1 for the number 1."""
    for divisor in range(3, number + 1, 2):
        if number % divisor == 0:
            return divisor
    return 1


def _letters_prompt(row: Row) -> str:
    """Writes a letter_counting prompt: the letter and the words in which it is counted."""
    words = " ".join(row.metadata["span"])
    return f"{row.metadata['target_letter']}:{words}"


def _letters_work(row: Row, checks: bool) -> list[str]:
    """Solves a letter_counting item by counting the letter in one word after another.

    Without `checks`, the only step is the list of running counts. With `checks`, each step contains
    a word and the count after it.
    """
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
    """Returns the sign between adjacent numbers of the sorted list: `<` (ascending) or `>`."""
    return ">" if row.metadata["direction"] == "descending" else "<"


def _sorting_prompt(row: Row) -> str:
    """Writes a number_sorting prompt: the sign of the order (`<` or `>`) and the numbers."""
    numbers = ",".join(row.metadata["original_numbers"])
    return f"{_sorting_sign(row)}{numbers}"


def _sorting_work(row: Row, checks: bool) -> list[str]:
    """Solves a number_sorting item by inserting one number after another into a sorted list.

    Each step is the list so far. With `checks`, the last step compares adjacent numbers.
    """
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
    """Writes the sorted list of a number_sorting item without spaces and quotation marks."""
    return f"[{','.join(metadata['sorted_numbers'])}]"


# Short prompts and traces by the name of the generator.
SHORT = {
    "path_star": ShortForm(_path_prompt, _path_work),
    "count_bits": ShortForm(_bits_prompt, _bits_work),
    # The short prompt does not contain a gate with a single input, which may be a NAND or a NOR.
    "circuit_logic": ShortForm(
        _circuit_prompt, _circuit_work, minimums={"min_inputs": 2, "min_terms": 2}
    ),
    "gcd": ShortForm(_gcd_prompt, _gcd_work),
    "chain_sum": ShortForm(_sum_prompt, _sum_work),
    "count_primes": ShortForm(_primes_prompt, _primes_work),
    "letter_counting": ShortForm(_letters_prompt, _letters_work),
    "number_sorting": ShortForm(_sorting_prompt, _sorting_work, _sorting_answer),
}
