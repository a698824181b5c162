"""`onecard config`: what is remembered for plan and eta, and that flags win."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from onecard.cli import main
from onecard.cli.remembered import config_path


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "of" / "mine" / "config.toml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONECARD_CONFIG", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def config(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["config", *words])
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    main(["plan", "--max_iters=1000", "--warmup_iters=10", "--json", *words])
    out, err = capsys.readouterr()
    return dict(json.loads(out)), err


def test_it_shows_sets_and_forgets(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert "nothing is remembered" in config(capsys)[1] and not file.exists()
    said = "gpu=RTX 4070 Laptop\nhost_ram=32\nprice=3-4\ncurrency=NT$\n"
    assert config(capsys, "gpu=4070 portátil", "price=3-4", "host-ram=32", "currency=NT$") == (0, said, "")
    assert config(capsys) == (0, said, "")
    assert config(capsys, "price=", "gpu=")[1] == "host_ram=32\ncurrency=NT$\n"
    assert stat.S_ISREG(file.stat().st_mode) and [*file.parent.iterdir()] == [file]


def test_a_name_alone_shows_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    config(capsys, "gpu=4070", "host_ram=32")
    assert config(capsys, "gpu") == (0, "gpu=RTX 4070\n", "")
    assert config(capsys, "host-ram", "gpu")[1] == "gpu=RTX 4070\nhost_ram=32\n"
    assert config(capsys, "price") == (0, "price is not remembered\n", "")
    assert config(capsys, "gpu", "price=3", "gpu=")[1] == "gpu is not remembered\n"
    assert config(capsys)[1] == "host_ram=32\nprice=3\n", "and what was set beside it is kept"


def test_plan_counts_on_it_and_flags_win(capsys: pytest.CaptureFixture[str]) -> None:
    config(capsys, "gpu=4070", "price=3-4", "host_ram=16", "currency=NT$")
    found, notes = planned(capsys)
    assert found["gpu"]["name"] == "RTX 4070" and found["host"]["allowed_gib"] == 14
    assert found["cost"]["currency"] == "NT$" and found["cost"]["amount_high"] > found["cost"]["amount"]
    assert "remembered by onecard config: gpu=RTX 4070, host_ram=16, price=3-4, currency=NT$" in notes
    found, notes = planned(capsys, "--gpu=RTX 3090", "--price=0.5", "--currency=CHF", "--host-ram=64")
    assert (found["gpu"]["name"], found["host"]["allowed_gib"]) == ("RTX 3090", 62)
    assert found["cost"]["currency"] == "CHF" and "amount_high" not in found["cost"]
    assert "remembered" not in notes


def test_eta_counts_on_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    config(capsys, "gpu=RTX 3090")
    lines = [f"iter {n}: loss 4.0, time 4321.12ms, mfu 11.52%" for n in range(10, 60, 10)]
    Path("log.txt").write_text("number of parameters: 40.55M\n" + "\n".join(lines))
    for words, card in (([], "RTX 3090"), (["--gpu=4070"], "RTX 4070")):
        assert main(["eta", "log.txt", "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["card"] == card


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("prize=3", "did you mean price?"), ("a=b", "does not remember 'a'"),
        ("card", "does not remember 'card'"),
        ("price=3,50", "--price=3.50"), ("price=lots", "takes a number"),
        ("host_ram=-1", "--host-ram cannot be"), ("gpu=RTX 9999", "no known card"),
        ("currency=a\x1b[31m", "cannot be printed"), ("gpu=A100", "more than one card"),
    ],
)  # fmt: skip
def test_what_cannot_be_remembered_is_an_error(
    word: str, said: str, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    code, out, err = config(capsys, word)
    assert code == 2 and said in err and not out and not file.exists()


@pytest.mark.parametrize(
    "content",
    [b"price = [", b"\xff\xfe", b"price = 'lots'", b"gpu = 3", b"x = " + b"[" * 5000, b"#" * 70_000],
)
def test_a_damaged_file_costs_a_note(content: bytes, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    found, notes = planned(capsys, "--gpu=4070")
    assert found["fits"] and f"{file} is ignored: " in notes and found["cost"]["currency"] == "EUR"
    assert config(capsys, "price=0.4")[1] == "price=0.4\n", "and is replaced"
    assert config(capsys) == (0, "price=0.4\n", "")


def test_a_device_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("ONECARD_CONFIG", str(tmp_path / "pipe"))
    assert "not an ordinary file" in planned(capsys, "--gpu=4070")[1]


def test_it_lies_where_the_system_has_such_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONECARD_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert config_path() == tmp_path / "onecard" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert config_path() == Path.home() / ".config" / "onecard" / "config.toml"
