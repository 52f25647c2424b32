"""The report of a run and the page of a server, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import run_events
from builders.click_models import make_app, make_model
from hosts.browser import SCHEMES, WIDTHS, chart_texts, chromium, opened
from hosts.ports import free_ports
from playwright.sync_api import Browser

from rayrec.observe.report import run as report
from rayrec.serve.listener import Listener

pytestmark = [pytest.mark.slow, pytest.mark.extended]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_report_is_readable(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(
        report.render(report.Run(run_events.CONFIG, run_events.run(), run_events.SUMMARY))
    )
    with opened(browser, path.as_uri(), width=width, scheme=scheme) as page:
        assert {"200", "step"} <= set(chart_texts(page))
        assert page.title()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_serving_page_scores_example(browser: Browser, scheme: str, width: int) -> None:
    port = free_ports(1)
    listener = Listener(
        make_app(make_model()), host="127.0.0.1", port=port, max_body_bytes=1 << 20, end_s=5
    )
    with opened(browser, f"http://127.0.0.1:{port}", width=width, scheme=scheme) as page:
        page.click("text=Example")
        page.click("text=Score")
        result = page.wait_for_selector("#result b")
        assert result is not None
        assert 0 < float(result.inner_text().removesuffix(" %")) < 100
    listener.close()
