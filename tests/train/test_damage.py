"""Random damage to a run's folder: never a traceback, never other training, never in silence."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, weights

from onecard.cli import main
from onecard.run.stored import list_checkpoints

CASES, AT_EVERY_CHANGE, A_TEST = 200, 50, 25
RUN = [*TINY, "--n_layer=2", "--n_embd=16", "--log_interval=1"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """A run killed after step 12 of 20, with checkpoints of 5 and 10, and what it would have come to."""
    from conftest import write_bins

    from onecard.train.journal import Journal

    folder = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_bins(folder / "data" / "tiny", train=6_000, val=1_500)
        assert main(["train", *RUN, "--out_dir=whole"]) == 0
        plain = Journal.stepped

        def stepped(journal: Journal, step: int, *rest: float) -> None:
            plain(journal, step, *rest)
            if step == 12:
                raise KeyboardInterrupt

        patch.setattr(Journal, "stepped", stepped)
        assert main(["train", *RUN]) == 130
        patch.undo()
        patch.chdir(folder)
        final = weights("whole")
        shutil.rmtree("whole")
        yield folder, final


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def zeros(path: Path, chance: random.Random) -> None:
    """As a power cut leaves it."""
    content = bytearray(path.read_bytes())
    begin = chance.randrange(len(content) + 1)
    content[begin:] = bytes(len(content) - begin)
    path.write_bytes(content)


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(300)))


def grown(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(50))


def removed(path: Path, chance: random.Random) -> None:
    path.unlink()


def fifo(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path, chance: random.Random) -> None:
    os.truncate(path, 23 * 2**30)


def swapped(path: Path, chance: random.Random) -> None:
    """The file of the same name of another checkpoint, or another file."""
    others = [other for other in sorted(path.parents[1].rglob(path.name)) if other != path]
    others = others or [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    shutil.copyfile(chance.choice(others), path)


def other_value(path: Path, chance: random.Random) -> None:
    """A number of a JSON file is another one, and it is JSON as before."""
    if path.suffix != ".json":
        return flip(path, chance)
    content = json.loads(path.read_text())
    values = content.get("values", content.get("config", content))
    names = [name for name, value in values.items() if isinstance(value, int | float)]
    name = chance.choice(names)
    values[name] = values[name] * 2 if values[name] else 1
    path.write_text(json.dumps(content, indent=1))
    return None


def a_checkpoint(path: Path, chance: random.Random) -> None:
    """A whole checkpoint is removed, renamed, or has a file in its place."""
    victim = chance.choice([found.path for found in list_checkpoints(Path("out/checkpoints"))] or [path])
    kind = chance.randrange(3)
    if kind == 0:
        victim.rename(victim.with_name("step-00000011"))
    elif victim.is_dir():
        shutil.rmtree(victim)
        if kind == 1:
            victim.touch()


HARMS: list[Callable[[Path, random.Random], None]] = [
    flip, truncate, zeros, garbage, grown, removed, fifo, endless, folder, huge, swapped, other_value,
    a_checkpoint,
]  # fmt: skip


def damaged(chance: random.Random) -> tuple[list[str], set[str]]:
    """One to three files of the folder; what was done, and to which."""
    done, names = [], set()
    for _ in range(chance.choice((1, 1, 2, 3))):
        files = sorted(path for path in Path("out").rglob("*") if path.is_file() and not path.is_symlink())
        path, harm = chance.choice(files), chance.choice(HARMS)
        if path.stat().st_size > 2**30:
            continue
        with contextlib.suppress(FileExistsError):
            harm(path, chance)
        done.append(f"{harm.__name__} {path}")
        names.add(path.name)
    return done, names


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.long] if first >= AT_EVERY_CHANGE else [])
        for first in range(0, CASES, A_TEST)
    ],
)
def test_a_damaged_folder_goes_on_the_same_or_says_why_not(
    pristine: tuple[Path, dict[str, torch.Tensor]], first: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, whole = pristine
    went_on = 0
    for seed in range(first, first + A_TEST):
        place = tmp_path / str(seed)
        shutil.copytree(source, place)
        monkeypatch.chdir(place)
        done, names = damaged(random.Random(seed))
        code = main(["train", "--out_dir=out"])
        said = capsys.readouterr().err
        why = f"seed {seed}: {done}\n{said}"
        assert code in (0, 1, 2), why
        if code:
            assert said.startswith("error: ") or "\nerror: " in said, why
        else:
            went_on += 1
            final = weights()
            assert all(torch.equal(final[name], whole[name]) for name in whole), why
            if "from out, step 10" not in said:
                assert "is damaged" in said or "a_checkpoint" in str(done), why
            if "metrics.jsonl" not in names:
                curve = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()[1:]]
                steps = [line["step"] for line in curve if "loss" in line]
                assert steps == list(range(20)), why
        shutil.rmtree(place)
    assert went_on > A_TEST // 3, "most damage leaves something to go on from"
