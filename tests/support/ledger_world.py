"""What the ledger's tests know of it without its code: questions read by a pattern, work redone."""

import re


def operations(question):
    """Start digit and (label, operand) pairs, read by a pattern."""
    return int(question[0]), re.findall(r"([a-h])(\d)", question[1:])


def check_trace(question, trace):
    """Re-executes a worked trace line by line; returns lines written twice and the final value."""
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
    """Checks copied operands and the result of the short style."""
    start, wanted = operations(question)
    numbers, result = trace.split("=")
    assert [int(digit) for digit in numbers] == [start, *(int(n) for _, n in wanted)]
    assert int(result) == sum(int(digit) for digit in numbers) % 10
    return int(result)


def style_of(question, trace):
    n = len(operations(question)[1])
    if "+" not in trace:
        check_at_once(question, trace)
        return "at_once"
    redone, _ = check_trace(question, trace)
    return "steps" if redone == 0 else "redo" if redone == n else "partly redone"
