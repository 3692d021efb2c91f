"""report.html and comparison.html in a browser: nothing is loaded, tabs and filters work."""

import pytest

from bacr_jax.report.page import write_comparison, write_report
from browser_world import SIZES, browser  # noqa: F401
from report_world import HOSTILE, make_whole_run
from serve_world import until

pytestmark = pytest.mark.browser
TABS = ["Overview", "Accuracy", "Training", "Traces", "Config"]


# Sizes of the visible texts of charts, in pixels.
_SIZES = (
    "return [...document.querySelectorAll('svg text')].filter(e => e.checkVisibility())"
    ".map(e => parseFloat(getComputedStyle(e).fontSize))"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    one = make_whole_run(folder / "a")
    two = make_whole_run(folder / "b", gain=0.4, method="grpo")
    return write_report(one), write_comparison([one, two], ["BACR", f"GRPO {HOSTILE}"], None)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", [0, 1], ids=["one", "several"])
def test_every_tab_is_readable_and_loads_nothing(browser, pages, which, size, dark):  # noqa: F811
    browser.open(pages[which], size=size, dark=dark)
    tabs = browser.find(".tabs a")
    assert [tab.text for tab in tabs] == TABS[: len(tabs)]
    for tab in tabs:
        tab.click()
        shown = [one for one in browser.find("section") if one.is_displayed()]
        assert [one.get_attribute("id") for one in shown] == [tab.text.lower()]
        for trace in browser.find("section:not([hidden]) details.trace")[:2]:
            trace.find_element("css selector", "summary").click()
        assert browser.overflow() <= 0
        if browser.find("section:not([hidden]) .plot"):
            # Axes are read on a telephone too.
            until(lambda: browser.run(_SIZES))
            assert min(browser.run(_SIZES)) >= 10
        ratio, element = browser.lowest_contrast()
        assert ratio >= 4.5, element
    assert browser.complaints() == [] and browser.requests() == []


def drawn(browser):  # noqa: F811
    """The first chart of the page, once it is drawn."""
    until(lambda: browser.find(".plot svg"))
    return browser.find(".plot svg")[0]


def test_a_chart_answers_the_pointer_and_zooms(browser, pages):  # noqa: F811
    from selenium.webdriver.common.action_chains import ActionChains

    browser.open(pages[0])
    chart = drawn(browser)
    ActionChains(browser.driver).move_to_element(chart).perform()
    until(lambda: browser.find(".vg-tooltip.visible"))
    text = browser.find(".vg-tooltip")[0].text
    assert "thinking budget (tokens)" in text and "accuracy (%)" in text
    assert "BACR" in text or "before" in text
    names = lambda: [text.text for text in chart.find_elements("css selector", "text")]
    before = names()
    box = chart.rect
    wheel = {"type": "mouseWheel", "x": box["x"] + box["width"] / 2, "deltaX": 0, "deltaY": -400}
    wheel["y"] = box["y"] + box["height"] / 3 - browser.run("return scrollY")
    # Without the key, the page scrolls.
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    assert names() == before
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {**wheel, "modifiers": 2})
    until(lambda: names() != before)


def test_every_chart_is_drawn_before_it_is_printed(browser, pages):  # noqa: F811
    browser.open(pages[0])
    browser.run("dispatchEvent(new Event('beforeprint'))")
    count = len(browser.find(".plot"))
    until(lambda: len(browser.find(".plot svg")) == count > 10)


def test_the_page_begins_where_its_address_says(browser, pages):  # noqa: F811
    browser.open(pages[0])
    browser.run("location.hash = '#traces'")
    assert browser.find("#traces")[0].is_displayed()
    assert not browser.find("#overview")[0].is_displayed()


def choose(browser, name, value):  # noqa: F811
    from selenium.webdriver.support.ui import Select

    Select(browser.find(f"select[data-filter={name}]")[0]).select_by_value(value)


def left(browser):  # noqa: F811
    """Traces that are shown, and what the page says of their number."""
    shown = [one for one in browser.find("details.trace") if one.is_displayed()]
    return shown, browser.find("output[data-count]")[0].text


def test_filters_choose_among_the_traces(browser, pages):  # noqa: F811
    browser.open(pages[0])
    browser.find(".tabs a[href='#traces']")[0].click()
    shown, said = left(browser)
    assert len(shown) == 96 and said == "96 traces"
    # Of the 8 rows of 12 steps: even ones are right; 0, 3 and 6 are cut; 0, 3, 6 have 64 tokens.
    choose(browser, "verdict", "right")
    assert len(left(browser)[0]) == 48
    choose(browser, "thinking", "cut")
    assert left(browser)[1] == "24 of 96 traces"
    choose(browser, "budget", "64")
    assert left(browser)[1] == "24 of 96 traces"
    choose(browser, "level", "1")
    assert left(browser)[1] == "12 of 96 traces"
    choose(browser, "step", "7")
    (trace,), said = left(browser)
    assert said == "1 of 96 traces" and trace.get_attribute("data-step") == "7"
    choose(browser, "step", "")
    search = browser.find("input[data-search]")[0]
    search.send_keys("PLUS 12?")
    assert left(browser)[1] == "1 of 96 traces"
    search.send_keys("\n")
    assert browser.driver.current_url.endswith("report.html#traces")


def test_runs_of_a_comparison_are_a_filter_too(browser, pages):  # noqa: F811
    browser.open(pages[1])
    browser.find(".tabs a[href='#traces']")[0].click()
    before = len(left(browser)[0])
    choose(browser, "run", f"GRPO {HOSTILE}")
    shown, _ = left(browser)
    assert 0 < len(shown) < before
    assert {one.get_attribute("data-run") for one in shown} == {f"GRPO {HOSTILE}"}


def test_colours_can_be_chosen_against_the_system(browser, pages):  # noqa: F811
    browser.open(pages[0], dark=True)
    paper = lambda: browser.run("return getComputedStyle(document.body).backgroundColor")
    button = browser.find("#theme")[0]
    dark = paper()
    assert button.text == "colours: system"
    button.click()
    assert button.text == "colours: light" and paper() == "rgb(255, 255, 255)" != dark
    button.click()
    assert button.text == "colours: dark" and paper() == dark
    assert browser.lowest_contrast()[0] >= 4.5
