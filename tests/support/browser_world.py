"""A headless Chromium that tells what a page did, and pages to show it."""

import json
import shutil

import pytest

SIZES = {"wide": (1280, 900), "narrow": (420, 900)}

# Contrast of every text with what lies behind it (WCAG 2.2), the lowest first.
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
    """Chromium without a window."""

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
        """Opens a file; what was logged before is forgotten."""
        self.open_address(path.absolute().as_uri(), size=size, dark=dark)

    def open_address(self, address, *, size="wide", dark=False):
        """Opens a page that a server has, or a file."""
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.complaints(), self.requests()
        self.driver.get(address)

    def run(self, script):
        return self.driver.execute_script(script)

    def find(self, css):
        return self.driver.find_elements("css selector", css)

    def complaints(self):
        """Messages on the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Addresses that were asked for, files and parts of the page aside."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        own = ("file:", "data:", "about:", "chrome:")
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(own)]

    def overflow(self):
        """Pixels by which the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth - innerWidth")

    def lowest_contrast(self):
        """(ratio, element) of the text that is hardest to read."""
        return self.run(_CONTRAST)[0]

    def click(self, element):
        element.click()


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium", reason='needs the extra browser: pip install -e ".[browser]"')
    if not shutil.which("chromedriver"):
        pytest.skip("needs Chromium and chromedriver: apt-get install chromium chromium-driver")
    one = Browser()
    yield one
    one.driver.quit()
