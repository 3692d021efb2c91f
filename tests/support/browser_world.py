"""Opens pages in a headless Chromium and reports their messages, requests and layout."""

import json
import shutil

import pytest

# Width and height of the window, in pixels.
SIZES = {"wide": (1280, 900), "narrow": (420, 900)}

# JavaScript that returns the three texts with the lowest contrast to their background, lowest
# first. Each is a pair of the contrast ratio of WCAG 2.2 and the start of the element's HTML.
_CONTRAST = """
const channel = (v) => (v /= 255, v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const found = numbers(getComputedStyle(one).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !element.checkVisibility() || element.tagName === "SCRIPT" ||
      element.tagName === "title" || element.tagName === "OPTION") continue;
  const style = getComputedStyle(element);
  const ink = numbers(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), element.outerHTML.slice(0, 120)]);
}
return found.sort((x, y) => x[0] - y[0]).slice(0, 3);
"""


class Browser:
    """Controls a Chromium without a window."""

    def __init__(self):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, path, *, size="wide", dark=False):
        """Opens a file (see `open_address`)."""
        self.open_address(path.absolute().as_uri(), size=size, dark=dark)

    def open_address(self, address, *, size="wide", dark=False):
        """Opens a URL, and discards the messages and requests that were logged before.

        Args:
          size: size of the window, a key of `SIZES`.
          dark: True if the page should use its dark color scheme.
        """
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.complaints(), self.requests()
        self.driver.get(address)

    def run(self, script):
        """Runs JavaScript in the page and returns its result."""
        return self.driver.execute_script(script)

    def find(self, css):
        """Returns the elements that match a CSS selector."""
        return self.driver.find_elements("css selector", css)

    def complaints(self):
        """Returns the console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Returns the URLs that were requested since the last call.

        URLs of files, and URLs that need no network (`data:`, `about:`, `chrome:`), are left out.
        """
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        own = ("file:", "data:", "about:", "chrome:")
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(own)]

    def overflow(self):
        """Returns the number of pixels by which the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth - innerWidth")

    def lowest_contrast(self):
        """Returns (contrast ratio, start of the element's HTML) of the least readable text."""
        return self.run(_CONTRAST)[0]

    def click(self, element):
        element.click()


@pytest.fixture(scope="module")
def browser():
    """Starts a browser for the tests of a module, or skips them if a program is missing."""
    pytest.importorskip("selenium", reason='needs the extra browser: pip install -e ".[browser]"')
    if not shutil.which("chromedriver"):
        pytest.skip("needs Chromium and chromedriver: apt-get install chromium chromium-driver")
    one = Browser()
    yield one
    one.driver.quit()
