"""Headless Chromium: pages as a reader sees them, without errors in the console and within the
width of the window.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
READABLE = 3.0
"""Least contrast of a chart's text and its background (WCAG 2.2, 1.4.11)."""
SCHEMES = ("light", "dark")
WIDTHS = (390, 1280)

_FAINT = """
() => {
  const rgb = text => {
    const [r, g, b, a = 1] = text.match(/[0-9.]+/g).map(Number);
    return a ? [r, g, b] : null;
  };
  const light = color => {
    const [r, g, b] = color
      .map(value => value / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color) return color;
    }
    return [255, 255, 255];
  };
  const contrast = node => {
    const lights = [light(rgb(getComputedStyle(node).fill)), light(behind(node))];
    const [low, high] = lights.sort((a, b) => a - b);
    return (high + .05) / (low + .05);
  };
  return [...document.querySelectorAll("svg text")].map(node => [contrast(node), node.textContent]);
}
"""
"""Returns [contrast, text] of each text of the charts."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium. Skips the test if there is none, unless RAYREC_REQUIRE_BROWSER is set."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found and not os.environ.get("RAYREC_REQUIRE_BROWSER"):
        pytest.skip("there is no Chromium")
    assert found, (
        "RAYREC_REQUIRE_BROWSER is set, and there is no Chromium: apt-get install chromium"
    )
    with sync_playwright() as playwright:
        # tests may run as root
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, width: int, scheme: str) -> Iterator[Page]:
    """Open a page. At the end, no error may be in its console, and it may not be wider than the
    window.
    """
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.goto(url)
    yield page
    assert not errors, errors
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def chart_texts(page: Page) -> list[str]:
    """Return the texts of all charts. Each must be readable on its background."""
    found = page.evaluate(_FAINT)
    assert [(round(contrast, 2), text) for contrast, text in found if contrast < READABLE] == []
    return [text for _, text in found]
