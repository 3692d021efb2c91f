"""study.html in a browser: nothing is loaded, and it can be read everywhere."""

import pytest

from bacr_study.results import write_results
from browser_world import SIZES, browser  # noqa: F401
from cells_world import ARMS, main_study, write_cells

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    arms = tuple(arm for arm in ARMS if arm.id in ("cot", "anytime", "bacr_paper"))
    study = main_study(arms=arms, seeds=(0, 1, 2), reference=("anytime",))
    write_cells(folder, study, problems=12, steps=10)
    write_results(folder, study)
    return folder / "study.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_readable_and_loads_nothing(browser, page, size, dark):  # noqa: F811
    browser.open(page, size=size, dark=dark)
    assert browser.overflow() <= 0
    ratio, element = browser.lowest_contrast()
    assert ratio >= 4.5, element
    assert browser.find(".plot")
    assert browser.complaints() == [] and browser.requests() == []


def test_charts_have_the_rows_of_their_picture(browser, page):  # noqa: F811
    browser.open(page, size="wide")
    tops = browser.run(
        "return [...document.querySelectorAll('.charts.row-of-2')].map("
        "part => [...part.children].map(chart => chart.getBoundingClientRect().top))"
    )
    assert tops
    for first, second, *others in tops:
        assert first == second and all(top > first for top in others)
