"""Plan's first screen: the verdict first, lines to paste, all of it in a terminal of 24 lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onecard.cli import main

ROOT = Path(__file__).resolve().parents[2]
FINEWEB = str(ROOT / "config" / "train_fineweb.py")
D32 = ["--arch=nanochat", "--generation=2025", "--depth=32"]
XL = ["--n_layer=48", "--n_head=25", "--n_embd=1600", "--max_iters=100", "--warmup_iters=10"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ONECARD_LANG", "en")
    monkeypatch.setenv("COLUMNS", "80")


def screen(capsys: pytest.CaptureFixture[str], *words: str, gpu: str = "RTX 4070") -> list[str]:
    main(["plan", *words, f"--gpu={gpu}"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("language", ["en", "es", "de"])
@pytest.mark.parametrize(
    "words",
    [
        (FINEWEB,), (FINEWEB, "--n_embd=768", "--batch_size=64", "--gradient_accumulation_steps=8"),
        (str(ROOT / "config" / "train_d12.py"),), tuple(D32), tuple(XL), (*XL, "--host-ram=64"),
    ],
    ids=["fits", "another setting", "d12", "d32", "xl", "xl with RAM"],
)  # fmt: skip
def test_it_fits_a_terminal_and_the_verdict_comes_first(
    words: tuple[str, ...], language: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    lines = screen(capsys, *words)
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines)
    verdict = {"en": "(Fits:|Does not fit)", "es": "(Cabe:|Tal como se pide no cabe)",
               "de": "(Passt:|So wie angegeben passt es nicht)"}  # fmt: skip
    assert re.match(verdict[language], lines[0])
    predicted = {"en": "predicted", "es": "previstos", "de": "vorhergesagt"}
    assert predicted[language] in lines[0]


def test_memory_is_listed_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optimizer states" not in "\n".join(screen(capsys, FINEWEB))
    shown = "\n".join(screen(capsys, FINEWEB, "--memory"))
    assert "Predicted peak memory" in shown and "optimizer states" in shown and "bytes ×" not in shown


def test_tflops_stand_with_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in screen(capsys, FINEWEB) if line.startswith("speed"))
    found = re.search(r"([\d.]+) effective TFLOPS, MFU (\d+)%", line)
    assert found and float(found[1]) / 58.3 == pytest.approx(int(found[2]) / 100, abs=0.006)


@pytest.mark.parametrize(
    "words",
    [("--n_embd=768", "--batch_size=64", "--gradient_accumulation_steps=8"), tuple(XL),
     ("--n_embd=768", "--vram_limit=3.5", "--host-ram=16"), (*D32, "--total_batch_size=524288")],
)  # fmt: skip
def test_the_lines_to_paste_are_the_setting(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what changes, the same tokens per step; with them the config fits as given."""
    lines = screen(capsys, *words)
    first, last = (n for n, line in enumerate(lines) if line.startswith("```"))
    block = lines[first + 1 : last]
    assert block and all(re.fullmatch(r"\w+ = \S+   # was \S+", line) for line in block)
    assert all(re.search(r"= (\S+)   # was (\S+)", line)[1] != line.split()[-1] for line in block)  # type: ignore[index]
    Path("pasted.py").write_text("\n".join(block))
    answers = []
    for more in ((), ("pasted.py",)):
        kept = [word for word in words if not (more and word.startswith(("--batch_size", "--gradient")))]
        main(["plan", *kept, *more, "--gpu=RTX 4070", "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    before, after = answers
    assert not before["as_given"]["fits"] and after["as_given"]["fits"]
    assert after["as_given"]["settings"].items() <= before["settings"].items()
    assert after["model"]["tokens_per_step"] == before["model"]["tokens_per_step"]


def test_a_laptop_held_to_less_power_may_be_as_much_slower(capsys: pytest.CaptureFixture[str]) -> None:
    def heading(*words: str, gpu: str = "RTX 4070 portátil") -> str:
        lines = screen(capsys, "--max_iters=1000", *words, gpu=gpu)
        at = next(n for n, line in enumerate(lines) if line.startswith("Predicted from"))
        return " ".join(lines[at : at + 2])

    # 60 of 115 W: at worst in proportion to it, and as uncertain as without.
    assert f"expect -{1 - 0.75 * 60 / 115:.0%} to +25%, held to 60 of 115 W" in heading("--watts=60")
    assert "expect ±25%" in heading() and "(--watts)" in heading()
    assert "expect ±25%" in heading("--watts=115"), "its full power"
    assert "expect ±15%" in heading("--watts=150", gpu="RTX 4070"), "a desktop's is a note"


def test_money_is_a_range_where_the_price_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in screen(capsys, FINEWEB, "--price=3-4", "--currency=NT$") if "NT$" in line)
    low, high = map(float, re.findall(r"[\d.]+", line)[:2])
    assert "at 3.00 – 4.00 NT$ a kWh" in line and high / low == pytest.approx(4 / 3, rel=0.01)
    main(["plan", FINEWEB, "--gpu=4070", "--price=3-4", "--json"])
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert (cost["amount"], cost["amount_high"]) == (low, high)
