"""Reading that ends, whatever lies in the file's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onecard.files import load_json, open_plain, parse_json, read_bounded, temporary_beside


def test_an_ordinary_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"größe": [1, 2.5, null]}', encoding="utf-8")
    assert load_json(path) == {"größe": [1, 2.5, None]}
    with open_plain(path) as file:
        assert file.read() == path.read_bytes()


def test_a_link_to_an_ordinary_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "link").symlink_to("a")
    assert read_bounded(tmp_path / "link", 2) == b"12"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not an ordinary file"):
        read_bounded(path, 100)


def test_a_file_that_is_larger_than_expected_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(23 * 2**30)  # sparse: it takes no room
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        load_json(path, 1000)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "{", "", b"\xff\xfe"])
def test_whatever_is_wrong_with_json_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    begin = (
        "import sys; from pathlib import Path; from onecard.files import temporary_beside\n"
        "place = temporary_beside(Path(sys.argv[1])); place.mkdir(); (place / 'half').write_text('x')\n"
        "print(place.name, flush=True); input()"
    )

    def beginner() -> tuple[subprocess.Popen[str], Path]:
        started = subprocess.Popen(
            [sys.executable, "-c", begin, str(tmp_path / "a [1]")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert started.stdout is not None
        return started, tmp_path / started.stdout.readline().strip()

    alive, its_place = beginner()
    killed, leftover = beginner()
    assert leftover.is_dir()
    killed.kill()
    killed.communicate()
    # Of another target, of a number that this process has got again, and somebody else's files.
    others = [f".b.{killed.pid}-01234567.tmp", f".a [1].{killed.pid}-x.tmp", ".a [1].tmp", "a [1]"]
    for name in others:
        (tmp_path / name).touch()
    earlier = tmp_path / f".a [1].{os.getpid()}-01234567.tmp"
    earlier.write_text("half")
    ours = temporary_beside(tmp_path / "a [1]")
    ours.write_text("half")
    assert ours != temporary_beside(tmp_path / "a [1]")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, its_place.name, ours.name])
    alive.communicate("\n")
    temporary_beside(tmp_path / "a [1]")
    assert not its_place.exists() and ours.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is in it twice"),
        ("[" + "[]," * 1_100_000 + "0]", "too many values"),
        ("[" + "0," * 4_100_000 + "0]", "too many values"),
        ("{" + ",".join(f'"{n}":0' for n in range(300_000)) + ',"9":0}', "'9' is in it twice"),
    ],
)
def test_what_would_be_lost_or_fill_the_memory_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    with pytest.raises(ValueError, match=said):
        parse_json(text.encode())
