"""Pages in headless Chromium, without a network: sorted, zoomed, hovered over, wide and narrow, dark and light.

They run where there are Debian's package `chromium` and playwright from PyPI, which drives it: `make browser`.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshweave.cli.app import run_app

pytestmark = pytest.mark.slow
FIXED = "strategy=megatron_sp,cp=1,micro_batch=1,zero=1,tp=2,pp=1:2:4"
WIDE, NARROW = 1400, 420
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make browser")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with driver.sync_playwright() as play:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = play.chromium.launch(executable_path=path, args=sandbox)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def step_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "step.html"
    args = [
        "--cluster",
        "dgx-h100:16",
        "--batch",
        "32",
        "--sequence",
        "2048",
        "--fix",
        FIXED,
        "--sensitivity",
    ]
    assert run_app(["plan", "llama-2-7b", *args, "--report", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("others")
    plan, page, runs = (folder / name for name in ("plan.json", "products.html", "runs.html"))
    args = [
        "--cluster",
        "tpu-v4-pod:16",
        "--batch",
        "8",
        "--products",
        "--algorithms",
        "meshslice,collective",
    ]
    assert run_app(["plan", "gpt3", *args, "--out", str(plan), "--report", str(page)]) == 0
    of = ["--layer", "ff1", "--pass", "forward", "--algorithm", "meshslice,collective"]
    assert run_app(["simulate", str(plan), *of, "--report", str(runs)]) == 0
    return [page, runs]


@pytest.fixture(scope="module")
def explorer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(runpy.run_path(str(DOCS / "explorer" / "build.py"))["explorer_page"](), "utf-8")
    return path


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str = "light", touch: bool = False) -> Iterator[Any]:
    """Yield the open page; afterwards it must have logged nothing and asked for nothing but its own file."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, has_touch=touch
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: complaints.append(sent.url) if sent.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_timeout(100)
    yield page
    assert not complaints
    context.close()


def brightness(page: Any) -> float:
    """Return the brightness of the ground of a page, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_page_fits_and_has_the_colours_of_the_system(
    browser: Any, step_file: Path, other_files: list[Path], explorer_file: Path, width: int, scheme: str
) -> None:
    for file in (step_file, *other_files, explorer_file):
        with opened(browser, file, width, scheme) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert (brightness(page) < 60) == (scheme == "dark")
            page.locator("#theme").click()
            assert page.locator("#theme").inner_text() == "colours: light"
            assert brightness(page) > 200
            page.locator("#theme").click()
            assert brightness(page) < 60


def test_text_has_enough_contrast(browser: Any, step_file: Path) -> None:
    """WCAG 2 wants 4.5 between text and ground."""
    for scheme in ("light", "dark"):
        with opened(browser, step_file, WIDE, scheme) as page:
            for name in ("ink", "quiet", "accent"):
                assert page.evaluate(_CONTRAST, name) >= 4.5, (scheme, name)


_CONTRAST = """name => {
  const probe = document.body.appendChild(document.createElement("span"));
  const light = variable => {
    probe.style.color = `var(--${variable})`;
    const of = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(value => value / 255);
    const [r, g, b] = of.map(value => value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const [a, b] = [light(name), light("ground")].sort((x, y) => y - x);
  return (a + .05) / (b + .05);
}"""


def test_a_click_on_a_head_sorts(browser: Any, step_file: Path) -> None:
    with opened(browser, step_file, WIDE) as page:
        for name, column in (("memory", 6), ("MFU", 4), ("bubble", 8)):
            button = page.get_by_role("button", name=re.compile(f"^{name}")).first
            for order in ("ascending", "descending"):
                button.click()
                head = page.locator(f"th[aria-sort={order}]")
                values = head.evaluate(
                    "(head, column) => [...head.closest('table').tBodies[0].rows]"
                    ".map(row => Number(row.children[column].dataset.value))",
                    column,
                )
                assert len(values) > 2 and values == sorted(values, reverse=order == "descending")


def view(page: Any) -> tuple[float, float]:
    """Return the begin and end of the time that the timeline shows, in seconds."""
    canvas = page.locator("#timelines canvas")
    return float(canvas.get_attribute("data-begin")), float(canvas.get_attribute("data-end"))


def test_a_timeline_zooms_moves_and_names_the_op_under_the_pointer(browser: Any, step_file: Path) -> None:
    with opened(browser, step_file, WIDE) as page:
        canvas = page.locator("#timelines canvas")
        canvas.scroll_into_view_if_needed()
        page.wait_for_timeout(400)
        box = canvas.bounding_box()
        whole = view(page)
        page.mouse.move(box["x"] + 500, box["y"] + 36)
        page.mouse.wheel(0, -240)
        page.wait_for_timeout(50)
        near = view(page)
        assert near[1] - near[0] < 0.7 * (whole[1] - whole[0])
        tip = page.locator("#timelines .tip")
        page.mouse.move(box["x"] + 510, box["y"] + 36)
        text = tip.inner_text()
        assert re.search(r"(forward|backward|gradient) of micro-batch \d+", text), text
        assert "pipeline rank 0" in text and re.search(r"starts at .+ takes .+s", text)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 36, steps=4)
        page.mouse.up()
        assert view(page)[0] > near[0]
        page.get_by_role("button", name="zoom in").click()
        assert view(page)[1] - view(page)[0] < near[1] - near[0]
        page.get_by_role("button", name="show all of it").click()
        assert view(page) == whole


def test_a_timeline_obeys_the_keyboard_and_has_layers(browser: Any, step_file: Path) -> None:
    with opened(browser, step_file, WIDE) as page:
        whole = view(page)
        page.locator("#timelines canvas").focus()
        status = page.locator("#timelines .status")
        page.keyboard.press("ArrowRight")
        assert "forward of micro-batch 0" in status.inner_text()
        page.keyboard.press("ArrowDown")
        assert "communication" in status.inner_text()
        page.keyboard.press("+")
        assert view(page)[1] - view(page)[0] == pytest.approx((whole[1] - whole[0]) / 2)
        page.get_by_role("button", name="a layer of the best").click()
        page.locator("#timelines canvas").focus()
        names = []
        for _ in range(5):
            page.keyboard.press("ArrowRight")
            names.append(status.inner_text())
        assert any("product" in name for name in names) and any("attention" in name for name in names)


def test_two_fingers_zoom_and_a_touch_names_an_op_on_a_phone(browser: Any, step_file: Path) -> None:
    with opened(browser, step_file, NARROW, "dark", touch=True) as page:
        canvas = page.locator("#timelines canvas")
        canvas.scroll_into_view_if_needed()
        box, whole = canvas.bounding_box(), view(page)
        wire = page.context.new_cdp_session(page)

        def touch(kind: str, *xs: float) -> None:
            points = [{"x": box["x"] + x, "y": box["y"] + 36, "id": i} for i, x in enumerate(xs)]
            wire.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", 180, 220)
        for step in range(1, 6):
            touch("touchMove", 180 - 10 * step, 220 + 10 * step)
        touch("touchEnd")
        near = view(page)
        assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
        page.touchscreen.tap(box["x"] + 200, box["y"] + 36)
        assert re.search(r"micro-batch \d+", page.locator("#timelines .status").inner_text())


def test_curves_and_the_front_tell_their_points(browser: Any, step_file: Path) -> None:
    for width in (WIDE, NARROW):
        with opened(browser, step_file, width) as page:
            for name, words in (
                ("curve-chips", "chips"),
                ("curve-batch", "sequences"),
                ("curve-links", "rate"),
            ):
                root = page.locator(f"#{name}")
                dot = root.locator("circle").nth(2)
                dot.scroll_into_view_if_needed()
                dot.hover(force=True)
                text = root.locator(".tip").inner_text()
                assert words in text and "% MFU" in text and "GB a chip" in text
            page.get_by_role("button", name="step time").click()
            assert "seconds a step" in page.locator("#curve-chips svg").inner_html()
            front = page.locator("#front")
            front.scroll_into_view_if_needed()
            front.locator("svg").focus()
            page.keyboard.press("ArrowRight")
            assert "GB a chip" in front.locator(".tip").inner_text()


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_two_algorithms_are_stepped_through_and_played(browser: Any, explorer_file: Path, width: int) -> None:
    with opened(browser, explorer_file, width) as page:
        assert re.search(
            r"MeshSlice ends after 5\.68 ms.* Collective takes 8\.87 ms", page.locator("#versus").inner_text()
        )
        first, second = (page.locator(".pane").nth(place) for place in (0, 1))
        assert first.locator(".chip.idle").count() == 16 and second.locator(".chip.busy").count() == 16
        assert "matmul" in second.locator("pre .a0").text_content()
        assert first.locator("details[open]").count() == (
            width == WIDE
        )  # both pictures on one screen of a phone
        assert "overlapped with the products" in second.locator(".idea").inner_text()
        clock = page.locator("#clock")
        before = clock.inner_text()
        page.get_by_role("button", name="op ▶").click()
        after = clock.inner_text()
        assert float(after.split()[0]) > float(before.split()[0])
        page.get_by_role("button", name="◀ op").click()
        assert float(clock.inner_text().split()[0]) < float(after.split()[0])
        page.locator("#time").fill("1000")
        assert (
            first.locator(".chip.over").count() == 16
            and "100 %" in first.locator(".chip").first.text_content()
        )
        page.get_by_role("button", name="play").click()
        page.wait_for_timeout(700)
        assert 0.2 < float(clock.inner_text().split()[0]) < 8
        page.get_by_role("button", name="stop").click()
        first.locator("select").select_option(label="Cannon")
        assert "Cannon takes 14.27 ms" in page.locator("#versus").inner_text()
        second.locator(".chip").nth(10).click()
        assert second.locator(".chip.picked").get_attribute("aria-label") == "chip 10"


def test_plans_and_published_runs_are_chosen_and_filtered(browser: Any, explorer_file: Path) -> None:
    for width, scheme in ((WIDE, "light"), (NARROW, "dark")):
        with opened(browser, explorer_file, width, scheme) as page:
            buttons = page.locator("#grid button")
            assert buttons.count() == 30
            buttons.first.click()
            assert "llama-3-8b on 16 chips of dgx-a100" in page.locator("#plan h3").first.inner_text()
            assert page.locator("#plan .stack").count() > 4
            score = page.locator("#score")
            whole = [int(number) for number in re.findall(r"(\d+) (?:runs|predicted)", score.inner_text())]
            runs = (
                page.evaluate("data.published.length"),
                page.evaluate("data.published.filter(r => r.error !== null).length"),
            )
            assert whole == list(runs) and runs[0] > 400
            page.get_by_label("kind", exact=True).select_option(label="experts")
            experts = "data.published.filter(run => run.experts && run.error !== null).length"
            assert page.locator("#scatter circle").count() == page.evaluate(experts) > 10
            page.get_by_label("kind", exact=True).select_option("")
            page.get_by_label("model or words").fill("gpt 1t")
            dots = page.locator("#scatter circle")
            assert 0 < dots.count() < 10
            dots.first.scroll_into_view_if_needed()
            dots.first.hover(force=True)
            assert re.search(
                r"GPT 1T on 512 A100.*published .*, predicted",
                page.locator("#scatter .tip").inner_text(),
                re.S,
            )
            page.get_by_label("model or words").fill("")
            page.get_by_role("button", name=f"all {runs[0]} rows").click()
            assert page.locator("#runs tbody tr").count() == runs[0]
