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
    # The last letter is a variable and not a unit.
    ("2l+2w", "2w+2l"),
    ("\\frac{t}{2}", "\\frac{1}{2}t"),
    ("h\\pi r^2", "\\pi r^2h"),
    ("\\frac{(a+b)h}{2}", "\\frac{a+b}{2} h"),
    ("2\\pi rh", "2\\pi hr"),
    ("10\\pi\\text{ cm}^{2}", "10\\pi"),
    ("10\\pi", "10\\pi\\text{ m}/\\text{s}"),
    ("10\\pi", "10\\pi feet"),
    ("2\\sqrt{3} cm", "2\\sqrt{3}"),
    # i is the imaginary unit in every spelling.
    ("\\frac{11-2i}{5}", "\\dfrac{11}{5} - \\dfrac{2}{5}i"),
    ("-\\frac{3i}{4}", "-\\frac{3}{4}i"),
    ("\\sqrt{2}i", "i \\sqrt{2}"),
    ("2e^{i\\pi/3}", "1+i\\sqrt{3}"),
    ("3 + 2 i + x", "3+x+2i"),
    ("\\frac{a-bi}{a^2+b^2}", "\\frac{1}{a+bi}"),
    ("\\frac{2+2i}{2}, \\frac{2-2i}{2}", "1-i, 1+i"),
    ("\\left(\\frac{2i}{2}, x\\right)", "(i,x)"),
    ("\\sum_{i=1}^{n} i", "\\frac{n(n+1)}{2}"),
    ("\\frac{2V}{2R}", "i=\\frac{V}{R}"),
    ("e^{-t}", "i(t)=e^{-t}"),
    # With i, variables are complex, also in the text without i.
    ("x=\\frac{1+i\\sqrt3}{2}, x=\\frac{1-i\\sqrt3}{2}", "\\frac12\\pm\\frac{\\sqrt3}{2}i"),
    ("x=\\pm\\frac{6i}{2}", "x=\\pm 3i"),
    ("\\{1-2i,\\frac{2+4i}{2}\\}", "x=1+2i, x=1-2i"),
    ("z=1-2i\\text{ or }z=\\frac{2+4i}{2}", "z=1+2i\\text{ or }z=1-2i"),
    ("x\\in\\{i,-i\\}", "x\\in\\{-i,i\\}"),
    ("iz^2=3i-4", "z^2=3+4i"),
    ("z(z-2)=-2i", "z^2-2z+2i=0"),
    ("z^2+1=0", "(z+i)(z-i)=0"),
    ("(z+i)(z-i)", "z^2+1"),
    ("z^3=8i^2", "z^3=-8"),
    ("|3i-z|=5", "|z-3i|=5"),
    ("|3i-z|<5", "|z-3i|<5"),
    ("x\\ne\\frac{6i}{2}", "x\\ne 3i"),
    ("e^{i\\theta}", "\\cos\\theta+i\\sin\\theta"),
    ("\\overline{z}+\\frac{2i}{2}", "\\overline{z}+i"),
    ("(2i^2x,3)", "(-2x,3)"),
    ("z=\\frac{2i}{2}, w=2i", "(z,w)=(i,2i)"),
    ("\\begin{pmatrix}\\frac{2i}{2}\\\\x\\end{pmatrix}", "\\begin{pmatrix}i\\\\x\\end{pmatrix}"),
    # As a side of a relation, i is a name.
    ("1\\le i\\le\\frac{6}{2}", "1\\le i\\le 3"),
    ("i=\\frac{10}{2}x", "i=5x"),
    ("i=\\sqrt{x^2}", "i=|x|"),
    # Letters inside of \text are no variables.
    ("\\frac{25\\pi}{4} cm", "6.25\\pi\\text{ cm}"),
    ("\\frac{5\\pi}{2} cm", "\\frac52\\pi\\mbox{ cm}"),
    ("\\frac{5\\pi}{2} cm", "\\frac52\\pi\\,\\mathrm{cm}"),
    # Both values of a sign.
    ("\\frac{1\\pm\\sqrt3}{2}", "\\frac{1+\\sqrt3}{2},\\frac12-\\frac{\\sqrt3}{2}"),
    ("\\frac{1-\\sqrt3}{2},\\frac{1+\\sqrt3}{2}", "\\frac12\\pm\\frac{\\sqrt3}{2}"),
    ("-2, 1-\\sqrt5,1+\\sqrt5", "\\{1\\pm\\sqrt{5},-2\\}"),
    # Unions of intervals.
    ("x<-2 or x>3", "(-\\infty,-2)\\cup(3,\\infty)"),
    ("(-\\infty,-2]\\cup(3,\\infty)", "x\\le -2\\text{ or }x>3"),
    ("x>\\sqrt{2}\\text{ or }x<1", "x\\in(-\\infty,1)\\cup(\\sqrt2,\\infty)"),
    # Values of several variables.
    ("y=\\frac{2}{\\sqrt2}, x=1", "(1,\\sqrt2)"),
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
    *(("5", f"5{letter}") for letter in "abcdefghjklmnopqrstuvwxyz"),
    *((f"5{letter}", "5") for letter in "acdfhlmst"),
    ("\\pi r^2", "\\pi r^2h"),
    ("\\pi r^2h", "\\pi r^2"),
    ("x^2+5", "x^2+5t"),
    ("x+2c", "x+2d"),
    ("v", "v t"),
    ("\\frac{a+b}{2}", "\\frac{a+b}{2}h"),
    ("2\\pi", "2\\pi hr"),
    ("\\sin^2 t", "\\sin^2 s"),
    ("2x\\text{ cm}+3y\\text{ cm}", "2x"),
    ("x\\text{ m}\\cdot y\\text{ m}", "x"),
    ("\\sqrt{5}\\text{m},\\sqrt{7}", "\\sqrt{5}"),
    ("\\frac{x}{2}\\mathrm{ or }\\frac{x}{3}", "\\frac{x}{2}"),
    ("\\frac{\\sqrt3}{2}\\mathrm{or}-\\frac{\\sqrt3}{2}", "\\frac{\\sqrt3}{2}"),
    ("\\frac{11+2i}{5}", "\\frac{11}{5}-\\frac{2}{5}i"),
    ("i", "-i"),
    ("\\frac{V}{R}i", "\\frac{V}{R}"),
    ("e^{-i\\theta}", "\\cos\\theta+i\\sin\\theta"),
    ("(x,2i)", "(2i,x)"),
    ("[2i,x]", "(2i,x)"),
    ("1+i, 1+i", "1+i, 1-i"),
    # Equations, lists and sets with i.
    ("x=\\pm 2i", "x=\\pm 3i"),
    ("x=\\pm 2", "x=\\pm 3i"),
    ("x=\\pm 3i", "x=\\pm 2"),
    ("y=\\pm 3i", "x=\\pm 3i"),
    ("x=3+4i, x=3-4i", "x=1+2i, x=1-2i"),
    ("z=2+i\\text{ or }z=2-i", "z=1+2i\\text{ or }z=1-2i"),
    ("x\\in\\{2i,i\\}", "x\\in\\{3i,i\\}"),
    ("\\{2i,x\\}", "\\{3i,x\\}"),
    ("x\\ne 2i", "x\\ne 3i"),
    ("z^2=5i", "z^2=3+4i"),
    ("z^2=4", "z^2=4i"),
    ("z^2=4i", "z^2=4"),
    ("z^3=i", "z^3=-i"),
    ("z^2+5z-7i=0", "z^2-2z+2i=0"),
    ("w=2iz, z=1", "w=3iz, z=1"),
    ("z=i, w=3i", "(z,w)=(i,2i)"),
    ("e^z=2i", "e^z=3i"),
    ("z=\\frac{i\\pi}{2}", "e^z=i"),
    ("\\emptyset", "z^2=3+4i"),
    ("i=2x", "i=3x"),
    ("i<2", "i<3"),
    ("x<2i", "x<3i"),
    ("\\begin{pmatrix}2i\\\\x\\end{pmatrix}", "\\begin{pmatrix}i\\\\x\\end{pmatrix}"),
    # Equal for real numbers, but not for complex numbers.
    ("|z+3i|=5", "|z-3i|=5"),
    ("|z+3i|<5", "|z-3i|<5"),
    ("|z+3i|", "|z-3i|"),
    ("z=\\pm 4", "|z-3i|=5"),
    ("|z-3i|=5", "z=\\pm 4"),
    ("(-4,4)", "|z-3i|<5"),
    ("|z-3i|<5", "(-4,4)"),
    ("\\overline{z}+i=0", "z+i=0"),
    ("\\sqrt{z^2}+i", "|z|+i"),
    # The unit is in \text, but the reference has a variable.
    ("\\frac{5\\pi}{2} cm", "\\frac52\\pi x\\text{ cm}"),
    ("\\frac{7\\pi}{2} cm", "\\frac52\\pi\\text{ cm}"),
    ("\\frac{1+\\sqrt3}{2}", "\\frac{1\\pm\\sqrt3}{2}"),
    ("\\frac{1\\pm\\sqrt3}{2}", "\\frac{1+\\sqrt3}{2}"),
    ("x<-2 or x>3", "(-\\infty,-2]\\cup(3,\\infty)"),
    ("x<-2\\text{ and }x>3", "(-\\infty,-2)\\cup(3,\\infty)"),
    ("y<-2\\text{ or }y>3", "x\\in(-\\infty,-2)\\cup(3,\\infty)"),
    ("x<-2\\text{ or }y>3", "(-\\infty,-2)\\cup(3,\\infty)"),
    ("y=1, x=\\frac{2}{\\sqrt2}", "(1,\\sqrt2)"),
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


def test_relation_of_imaginary_numbers_is_not_every_such_relation(grader):
    verdicts = grader.grade(["\\boxed{(2i)^2=-4}", "\\boxed{3i=3i}"], ["i^2=-1", "2i=2i"])
    assert not any(verdict.correct for verdict in verdicts)


@pytest.mark.parametrize(
    ("text", "gold", "is_right"),
    [
        ("So the circumference is $10\\pi cm$.", "10\\pi", True),
        ("So the circumference is $10\\pi cm$.", "10\\pi\\text{ cm}", True),
        ("So the circumference is $9\\pi cm$.", "10\\pi", False),
        ("So the circumference is $10\\pi$.", "10\\pi hr", False),
        ("So the volume is $10\\pi cm$.", "10\\pi x", False),
    ],
)
def test_bare_unit_in_prose_is_ignored_in_reports(grader, text, gold, is_right):
    assert grader.grade([text], [gold], mode="lenient")[0].correct is is_right
