"""A report as a page: whole, small, legible to everybody, and closed to what a log may hold."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import made_reports as made
import pytest

from onecard.errors import UserError
from onecard.report.answer import Report
from onecard.report.log import Evaluations, Log, Steps
from onecard.report.pages.html import page, write_page
from onecard.report.pages.markdown import markdown

VOID = {"meta", "br", "hr", "img", "link", "input", "path"}
MOST_BYTES = 60_000


class Strict(HTMLParser):
    """Every tag is closed in its order; what is on the page, by tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def parsed(content: str) -> Strict:
    parser = Strict()
    parser.feed(content)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("language", ["en", "es", "de"])
@pytest.mark.parametrize("name", made.EVERY)
def test_a_page_is_whole_and_asks_nothing_of_a_network(
    name: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    content = page(made.EVERY[name]())
    found = parsed(content)
    assert content.startswith("<!DOCTYPE html>")
    assert f'lang="{language}"' in content
    tags = {tag for tag, _attributes in found.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    names = {name for _tag, attributes in found.tags for name in attributes}
    assert not {"src", "href", "srcset", "action", "xlink:href"} & names
    assert not [name for name in names if name.startswith("on")]
    style = content[content.index("<style>") : content.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in content


def test_a_page_is_for_both_themes_and_for_narrow_screens() -> None:
    content = page(made.report())
    assert "prefers-color-scheme:dark" in content
    assert "@media(max-width" in content
    assert 'name="viewport" content="width=device-width' in content


def test_every_figure_is_said_in_words_and_stands_in_a_table() -> None:
    found = parsed(page(made.report()))
    identifiers = [a["id"] for _tag, a in found.tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    pictures = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(pictures) == 3  # loss, learning rate, speed
    for picture in pictures:
        assert picture["role"] == "img"
        assert set((picture["aria-labelledby"] or "").split()) <= set(identifiers)
    text = " ".join(found.text)
    assert "at step 6,000" in text
    assert "6,000" in re.findall(r"<td[^>]*>([^<]*)</td>", page(made.report()))


def test_what_a_log_holds_is_text_on_the_page() -> None:
    content = page(made.hostile())
    body = content[content.index("<body>") :]
    assert "<script" not in body
    assert "<img" not in body
    assert "</style" not in body
    assert made.HOSTILE.replace("\x1b", "") in " ".join(parsed(content).text).replace("\x1b", "")


def test_markdown_has_no_markup_of_the_log() -> None:
    said = markdown(made.hostile())
    outside = re.sub(r"(?s)(`{3,}).*?\1", "", said)
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)!(?=\[)", outside)
    assert said.startswith("**")


def of_steps(count: int) -> Report:
    draw = random.Random(3)
    steps = Steps(
        step=range(count), loss=[made.falling(s) + draw.gauss(0, 0.1) for s in range(count)],
        ms=[40 + draw.gauss(0, 4) for _s in range(count)], lr=[1e-3 * draw.random() for _s in range(count)],
    )  # fmt: skip
    every = range(0, count, 100)
    evaluations = Evaluations(step=every, val=[made.falling(s) + draw.gauss(0, 0.01) for s in every])
    facts = replace(made.report().facts, log=Log("nanogpt", steps, evaluations), last_step=count)
    return replace(made.report(), facts=facts)


def test_a_page_is_as_small_for_a_long_run() -> None:
    content = page(of_steps(50_000))
    assert len(content.encode()) <= MOST_BYTES
    pictures = re.findall(r"<svg.*?</svg>", content)
    assert max(map(len, pictures)) <= 20_000


@pytest.mark.long
def test_a_page_of_a_million_steps_is_as_small() -> None:
    assert len(page(of_steps(1_000_000)).encode()) <= MOST_BYTES


# --- written ----------------------------------------------------------------------------------------------


def test_a_page_is_written_over_a_report_and_over_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    write_page(target, page(made.report()))
    write_page(target, page(made.wrong()))
    assert "117M" in target.read_text(encoding="utf-8")
    notes = tmp_path / "notes.html"
    notes.write_text("<html>my notes</html>", encoding="utf-8")
    with pytest.raises(UserError, match="not a report"):
        write_page(notes, page(made.report()))
    assert notes.read_text(encoding="utf-8") == "<html>my notes</html>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.html", "report.html"]


@pytest.mark.parametrize("name", ["", "no/such/folder/report.html"])
def test_a_page_cannot_be_written_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / name, "page")


# --- in a browser -----------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.mark.long
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
@pytest.mark.parametrize(("theme", "background"), [(0, (18, 22, 27)), (1, (255, 255, 255))])
def test_a_browser_shows_it_in_both_themes(theme: int, background: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page(made.report()), encoding="utf-8")
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={theme}", "--window-size=390,844"]
    subprocess.run(
        [BROWSER, *flags, f"--screenshot={picture}", (tmp_path / "report.html").as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert first_pixel(picture.read_bytes()) == background


def first_pixel(png: bytes) -> tuple[int, ...]:
    """Of its first row, which no filter changes before the first pixel."""
    import zlib

    data = b"".join(
        png[m.end() : m.end() + int.from_bytes(png[m.start() - 4 : m.start()])]
        for m in re.finditer(b"IDAT", png)
    )
    return tuple(zlib.decompress(data)[1:4])
