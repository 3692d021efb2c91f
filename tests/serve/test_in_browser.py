"""The page of `bacr serve` in a browser: two answers as they stream, by mouse and by keyboard."""

import pytest

from bacr_serve.app import Limits
from browser_world import SIZES, browser  # noqa: F401
from serve_world import FakeBackend, listening, make_service, until

pytestmark = pytest.mark.browser
COLUMNS = [0, 1]


@pytest.fixture
def url():
    with listening(make_service(FakeBackend("x" * 40))) as url:
        yield url


def texts(browser, css):  # noqa: F811
    return [element.text for element in browser.find(css)]


def write(browser, question, budgets=(8, 64)):  # noqa: F811
    for column, budget in zip(COLUMNS, budgets):
        (field,) = browser.find(f"#number-{column}")
        field.clear()
        field.send_keys(str(budget))
    (field,) = browser.find("#question")
    field.send_keys(question)
    return field


def until_answered(browser):  # noqa: F811
    until(lambda: texts(browser, ".final") == ["42", "42"])
    until(lambda: not browser.find("[aria-busy=true]"))


def ready(browser):  # noqa: F811
    until(lambda: texts(browser, "h1") == ["policy"])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_two_answers_next_to_each_other(browser, url, size, dark):  # noqa: F811
    browser.open_address(url, size=size, dark=dark)
    ready(browser)
    write(browser, "1+1")
    browser.find("#ask")[0].click()
    until_answered(browser)
    assert texts(browser, ".thinking") == ["hm" * 4, "x" * 40]
    assert texts(browser, ".forced") == [
        "Thinking was cut at the budget; forced text: </think><answer>",
        "The policy closed its thinking; forced text: <answer>",
    ]
    assert texts(browser, ".counts") == [
        "8 of 8 thinking tokens, 2 forced, 3 answer",
        "41 of 64 thinking tokens, 1 forced, 3 answer",
    ]
    left, right = [element.rect for element in browser.find("section.answer")]
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    assert browser.overflow() <= 0
    ratio, element = browser.lowest_contrast()
    assert ratio >= 4.5, element
    assert browser.complaints() == []
    assert all(address.startswith(url) for address in browser.requests())


def test_the_keyboard_is_enough(browser, url):  # noqa: F811
    from selenium.webdriver.common.keys import Keys

    browser.open_address(url)
    ready(browser)
    field = write(browser, "1+1")
    seen = []
    for _ in range(6):
        field.send_keys(Keys.TAB)
        field = browser.driver.switch_to.active_element
        seen.append(field.get_attribute("id"))
    assert seen[:5] == ["range-0", "number-0", "range-1", "number-1", "ask"]
    (slider,) = browser.find("#range-0")
    slider.send_keys(Keys.HOME)
    assert browser.find("#number-0")[0].get_attribute("value") == "0"
    browser.find("#question")[0].send_keys(Keys.ENTER)
    until_answered(browser)
    assert texts(browser, ".counts")[0].startswith("0 of 0 thinking tokens, 2 forced")


def test_slider_and_number_follow_each_other(browser, url):  # noqa: F811
    browser.open_address(url)
    ready(browser)
    # From 64 tokens on; the first is an eighth.
    values = [browser.find(f"#number-{c}")[0].get_attribute("value") for c in COLUMNS]
    assert values == ["8", "64"]
    write(browser, "", (0, 64))
    sliders = [browser.find(f"#range-{c}")[0].get_attribute("value") for c in COLUMNS]
    assert sliders == ["0", "100"]


def test_text_of_the_policy_is_text(browser):  # noqa: F811
    with listening(make_service(FakeBackend("<img src=x onerror=alert(1)>"))) as url:
        browser.open_address(url)
        ready(browser)
        write(browser, "<b>1</b>", (60, 64))
        browser.find("#ask")[0].click()
        until_answered(browser)
        assert texts(browser, ".thinking") == ["<img src=x onerror=alert(1)>"] * 2
        assert browser.find("pre img") == []


def test_an_answer_can_be_stopped_and_a_refusal_is_shown(browser):  # noqa: F811
    service = make_service(FakeBackend(hangs_after=1), limits=Limits(concurrency=1))
    with listening(service) as url:
        browser.open_address(url)
        ready(browser)
        write(browser, "1+1")
        browser.find("#ask")[0].click()
        until(lambda: "hmhm" in texts(browser, ".thinking"))
        until(lambda: any("try again later" in text for text in texts(browser, "[role=alert]")))
        browser.find("#stop")[0].click()
        until(lambda: "Stopped." in texts(browser, "[role=alert]"))
        until(lambda: service.running == 0)


def test_a_key_is_asked_for(browser):  # noqa: F811
    from selenium.webdriver.common.keys import Keys

    with listening(make_service(api_key="secret")) as url:
        browser.open_address(url)
        until(lambda: browser.find("#key")[0].is_displayed())
        browser.find("#key")[0].send_keys("secret", Keys.TAB)
        ready(browser)
        write(browser, "1+1")
        browser.find("#ask")[0].click()
        until_answered(browser)
