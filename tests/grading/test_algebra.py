"""What the computer algebra of the workers accepts; asked through a grader, in both modes."""

import pytest

EQUAL = [
    ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
    ("\\cos\\frac{\\pi}{12}", "\\frac{\\sqrt6+\\sqrt2}{4}+0\\cos 1"),
    ("\\frac{2}{2^{99}}", "2^{-98}"),
    ("0.5x", "\\frac{x}{2}"),
    ("2x^2+2=0", "x^2+1=0"),
    ("xy=1", "y=\\frac{1}{x}"),
    ("\\frac{1}{2}LI^2", "\\frac{LI^2}{2}"),
    ("\\frac{q_0}{\\sqrt{2CL}}", "I_{\\max}=\\frac{q_0}{\\sqrt{2LC}}"),
    ("\\binom{2n}{n}", "\\frac{(2n)!}{(n!)^2}"),
    ("\\frac{n!}{k!(n-k)!}", "\\frac{n!}{(n-k)!k!}"),
    ("\\frac{\\sinh(at)}{a}", "\\frac{e^{at}-e^{-at}}{2a}"),
    ("-2 \\le x \\le 7", "[-2,7]"),
]
DIFFERENT = [
    ("-\\frac{1}{2^{98}}", "\\frac{1}{2^{98}}"),
    ("\\frac{1}{3^{60}}", "\\frac{1}{2^{98}}"),
    ("\\frac{3^{90}-1}{2\\cdot 3^{90}}", "\\frac{3^{90}+1}{2\\cdot 3^{90}}"),
    ("\\sqrt{2}+\\frac{1}{2^{90}}", "\\sqrt{2}"),
    ("0.0000000001", "\\frac{1}{2^{98}}"),
    ("10^{-20}x", "2\\cdot 10^{-20}x"),
    ("\\frac{M}{m+M}", "\\frac{m}{m+M}"),
    ("2\\Pi", "2\\pi"),
    ("\\Gamma x", "\\gamma x"),
    ("x_1+X_1", "2x_1"),
    ("I=V/R", "I=R/V"),
    ("I_1+I_2", "2I_1"),
    ("x^2+1=0", "x^2+4=0"),
    ("(x-1)(x^2+1)=0", "(x-1)(x^2+4)=0"),
    ("e^x=-1", "e^x=-5"),
    ("|x|=-1", "|x|=-2"),
    ("2^T", "2"),
]


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_equal_values_are_right(grader, mode):
    verdicts = grader.grade(
        [f"\\boxed{{{pred}}}" for pred, _ in EQUAL], [gold for _, gold in EQUAL], mode=mode
    )
    assert [row for row, v in zip(EQUAL, verdicts, strict=True) if not v.correct] == []


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_different_values_are_wrong_however_close_they_are(grader, mode):
    verdicts = grader.grade(
        [f"\\boxed{{{pred}}}" for pred, _ in DIFFERENT], [gold for _, gold in DIFFERENT], mode=mode
    )
    assert [row for row, v in zip(DIFFERENT, verdicts, strict=True) if v.correct] == []
