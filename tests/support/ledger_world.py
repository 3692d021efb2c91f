"""Parses questions of the ledger task and recomputes traces, independently of the task's code."""

import re


def operations(question):
    """Parses a question to its start digit and a list of (label, operand) pairs."""
    return int(question[0]), re.findall(r"([a-h])(\d)", question[1:])


def check_trace(question, trace):
    """Recomputes a trace line by line, and asserts that it is correct.

    Returns:
      The number of lines that are written twice, and the result.
    """
    value, wanted = operations(question)
    rest, redone = trace, 0
    for label, operand in wanted:
        total = (value + int(operand)) % 10
        line = f"{value}+{operand}={total}"
        assert rest.startswith(label + line), (question, trace, rest)
        rest = rest[1 + len(line) :]
        if rest.startswith(line):
            rest, redone = rest[len(line) :], redone + 1
        value = total
    assert rest == ""
    return redone, value


def check_at_once(question, trace):
    """Asserts that a trace in the style at_once is correct, and returns its result.

    Such a trace lists the start digit and the operands, followed by the result.
    """
    start, wanted = operations(question)
    numbers, result = trace.split("=")
    assert [int(digit) for digit in numbers] == [start, *(int(n) for _, n in wanted)]
    assert int(result) == sum(int(digit) for digit in numbers) % 10
    return int(result)


def style_of(question, trace):
    """Returns the style of a trace, and asserts that the trace is correct."""
    n = len(operations(question)[1])
    if "+" not in trace:
        check_at_once(question, trace)
        return "at_once"
    redone, _ = check_trace(question, trace)
    return "steps" if redone == 0 else "redo" if redone == n else "partly redone"
