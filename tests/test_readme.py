"""README and docs are true: their commands run, their files exist, their knobs are knobs."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onecard.cli import main
from onecard.cli.configs import config_of_sample
from onecard.cli.parser import parse
from onecard.cli.verbs import VERBS
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
ALL_PAGES = "\n".join(PAGES.values())
DOCS = "\n".join(text for path, text in PAGES.items() if path.parent.name == "docs")
THE_MAP = PAGES[ROOT / "docs" / "map.md"].split("```")[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", ALL_PAGES, flags=re.DOTALL)


def commands_to_run() -> list[str]:
    """Each once, whatever number of pages shows it."""
    lines = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return list(dict.fromkeys(lines))


@pytest.mark.slow
def test_the_commands_of_the_pages_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All in this process: each would load torch anew otherwise. That the doors work from a shell is
    tests/cli/test_cli.py's.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("config", "train.py", "sample.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = commands_to_run()
    # The doors come first on the page and need the data of the section after them.
    commands.sort(key=lambda command: not command.startswith("onecard prepare"))
    assert len(commands) >= 8
    for command in commands:
        door, *words = shlex.split(command)
        assert door in ("onecard", "python")
        try:
            if door == "onecard":
                code: object = main(words)
            else:
                monkeypatch.setattr(sys, "argv", words)
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        out, err = capfd.readouterr()
        assert code == 0, f"{command}\n{err}"
        assert out, command
    assert (tmp_path / "out-way-hf" / "model.safetensors").is_file()


def without_run_folders(words: list[str]) -> list[str]:
    """`plan out-fineweb` reads a folder that is not there while testing."""
    return [word for word in words if not word.startswith("out-")]


def test_commands_that_need_the_users_data_have_knobs_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.chdir(ROOT)
    shown = [
        shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line
    ]
    assert len(shown) >= 30
    for door, verb, *arguments in shown:
        if door == "pip":
            continue
        assert door == "onecard"
        if verb == "-":  # sent on, with its flags, to one of these
            verb, arguments = "doctor", ["-", *arguments]
        _options, rest = parse(VERBS[verb], arguments)
        if verb in ("plan", "train"):
            load_config(RunConfig, without_run_folders(rest))
        elif verb == "sample":
            load_config(SampleConfig, config_of_sample(rest))


def test_every_config_file_loads_without_a_note() -> None:
    files = sorted((ROOT / "config").glob("*.py"))
    assert len(files) >= 5
    for path in files:
        assert load_config(RunConfig, [str(path)]).notes == ()


def anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_go_to_what_is_there() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", text):
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), f"{path.name}: {target}"
            if anchor:
                assert anchor in anchors(found.read_text(encoding="utf-8")), f"{path.name}: {target}#{anchor}"


def test_the_wheels_description_has_no_link_to_a_file_beside_it() -> None:
    """A package index has no docs/ folder: with a home links are absolute, without one their words stay."""
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", README)
    assert len(relative) > 10 and not re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", description(README))
    assert "on one page." in description(README) and "![" not in description(README)
    at_home = description(README, "https://example.org/")
    assert "](https://example.org/docs/plan.svg)" in at_home and at_home.count("https://example.org/") == len(
        relative
    )


@pytest.mark.long
def test_the_wheels_metadata_has_that_description(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "onecard", tmp_path / "onecard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "config", tmp_path / "config")
    build = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert (
        "Description-Content-Type: text/markdown" in text and "on one page." in text and "](docs/" not in text
    )


def test_every_page_is_in_the_index_of_the_docs() -> None:
    index = PAGES[ROOT / "docs" / "README.md"]
    for path in PAGES:
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


def test_files_and_modules_named_in_the_pages_exist() -> None:
    """`benchmarks/results/…` and `tests/…`, in the docs and in benchmarks/README.md."""
    for text in (ALL_PAGES, (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`((?:benchmarks|tests|config|onecard)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists(), name


def test_every_benchmark_and_every_result_is_told_of() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    shared = ("accuracy_", "fit_", "peers_")  # parts of plan_accuracy.py, fit.py and peers.py
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert path.name in told or path.name.startswith(shared), path.name
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"`{path.name}`" in told, path.name


def test_the_map_names_what_is_there() -> None:
    room = ""
    for line in THE_MAP.splitlines():
        if found := re.match(r"  (\w+)/ ", line):
            room = found[1]
        elif found := re.match(r"    (\w+)/ ", line):
            room = f"{room.partition('/')[0]}/{found[1]}"
        elif line.startswith("  ") and re.match(r"  \w+\.py", line):
            room = ""
        if line.startswith("train.py"):
            break
        for name in re.findall(r"\b(\w+\.(?:py|toml))\b", line):
            assert (ROOT / "onecard" / room / name).is_file() or (ROOT / "onecard" / name).is_file(), name


def test_what_the_map_names_is_where_it_says() -> None:
    rows = PAGES[ROOT / "docs" / "map.md"].partition("## Where is")[2].splitlines()
    cells = [row.split("|")[2] for row in rows if row.startswith("| ")][1:]
    assert len(cells) == 8
    for cell in cells:
        paths = [ROOT / name for name in re.findall(r"`(onecard/[\w/]+\.py)`", cell)]
        content = "".join(path.read_text(encoding="utf-8") for path in paths)
        names = set(re.findall(r"`(\w+)`", cell))
        assert paths and all(f"def {name}(" in content for name in names), cell


def test_every_room_is_on_the_map() -> None:
    for path in (ROOT / "onecard").iterdir():
        if path.name.startswith("__"):
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name in THE_MAP, name


def test_every_module_of_the_data_room_is_on_the_map() -> None:
    for path in (ROOT / "onecard" / "data").rglob("*.py"):
        assert path.name in THE_MAP or path.name.startswith("__"), path.name


def test_results_name_no_folders_of_the_machine_they_were_made_on() -> None:
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from command_line import command_line

    words = [
        "/a/b/d32.py",
        "--out",
        "/some/where/x.json",
        "--work=~/y",
        "--data",
        "../z.parquet",
        "--steps",
        "2",
    ]
    assert command_line(words) == "python benchmarks/d32.py --out x.json --work=y --data z.parquet --steps 2"
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        found = re.findall(r'["= ](?:/[\w.-]+){2,}', path.read_text(encoding="utf-8"))
        assert found == [], path.name


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.splitlines()) <= 180
    assert len(README.split()) <= 2500


def test_the_picture_shows_what_plan_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the date it would be done: `make picture` draws it anew."""
    from onecard.cli import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no measurement of this machine's
    monkeypatch.setenv("COLUMNS", "80")
    drawn = ElementTree.fromstring((ROOT / "docs" / "plan.svg").read_text(encoding="utf-8"))
    command, *shown = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    words = shlex.split(command.removeprefix("$ onecard "))
    assert main(words) == 0
    made = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    without_dates = [
        [re.sub(r"\d{4}-\d\d-\d\d( \d\d:\d\d)?", "", line) for line in each] for each in (shown, made)
    ]
    assert without_dates[0] == without_dates[1]
    assert len(made) <= 22, "it fits a terminal of 24 lines, with the command and a prompt"
    assert all(len(line) <= 80 for line in made)


def test_nanogpts_figures_in_the_docs_are_those_of_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onecard.cli import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["plan", "config/train_fineweb.py", "--gpu=RTX 4070", "--as=nanogpt"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("nanoGPT, comp")]
    (_, _, _, _, compiled, *_), (_, _, _, _, eager, *_) = rows  # with CUDA itself
    said = PAGES[ROOT / "docs" / "plan.md"]
    assert (
        f"nanoGPT needs {compiled} GiB of the card ({eager} with `compile=False`) and {rows[0][6]} h" in said
    )


def _crossing(curve: list[list[float]], goal: float) -> float:
    """Tokens at which a curve reaches a loss, between two evaluations."""
    for (before, above), (after, below) in itertools.pairwise(curve):
        if above > goal >= below:
            return before + (after - before) * (above - goal) / (above - below)
    raise AssertionError("not reached")


def test_figures_in_the_pages_are_those_of_the_results() -> None:
    import json

    results = ROOT / "benchmarks" / "results"
    parity = json.loads((results / "2026-11-15-parity-nanogpt-200-steps.json").read_text())
    assert f"{parity['largest_difference']:.1e}".replace("e-07", "e-7") in DOCS
    table = json.loads((results / "2026-11-15-memory-speed-table-h200.json").read_text())
    for row in (r for r in table["summary"] if r["suite"] == "table" and r["label"] != "plain"):
        speed = "1" if row["label"] == "nanogpt" else f"{row['speed_ratio']:.2f}"
        assert f"| {row['peak_allocated_gib']:.2f} GiB | {speed} |" in DOCS, row["label"]
    notes = json.loads((results / "2026-11-16-memory-speed-notes-h200.json").read_text())["summary"]
    narrow = {r["label"]: r for r in notes if r["suite"] == "notes"}
    graph, plain = narrow["onecard exact graphs=True"], narrow["onecard exact"]
    assert f"{graph['peak_allocated_gib']:.2f} GiB instead of 9.88 at {graph['speed_ratio']:.2f} of" in DOCS
    assert f"({plain['speed_ratio']:.2f} without)" in DOCS
    graphs = json.loads((results / "2026-11-16-memory-speed-graphs-h200.json").read_text())["summary"]
    (wide,) = (r for r in graphs if r["label"] == "onecard exact graphs=True")
    assert f"{wide['peak_allocated_gib']:.2f} GiB at {wide['speed_ratio']:.2f}" in DOCS
    d32 = {r["part"]: r for r in json.loads((results / "2026-11-16-d32-h200.json").read_text())["rows"]}
    train, resume, sample = d32["train"], d32["resume"], d32["sample"]
    assert f"{max(train['peak_reserved_gib'], resume['peak_reserved_gib']):.2f} GiB reserved" in DOCS
    assert f"{resume['host_peak_gib']:.1f} GiB of RAM" in DOCS
    assert f"passes at {train['of_matmul_rate']:.2f} of" in DOCS
    assert f"the update {train['update_share']:.1%}" in DOCS
    assert f"sampling takes {sample['peak_reserved_gib']:.2f} GiB" in DOCS
    curves = json.loads((results / "2026-11-16-tokens-to-loss-h200.json").read_text())["rows"]
    (goal,) = (r for r in curves if r["contender"] == "gpt2")
    assert f"{goal['val_loss']:.3f} nats after 64M" in DOCS
    for name in ("2026", "matched"):
        (row,) = (r for r in curves if r["contender"] == name)
        assert f"after {_crossing(row['val'], goal['val_loss']) / goal['tokens']:.0%}" in DOCS
    exact, tight = json.loads((results / "2026-11-16-tight-recipe-h200.json").read_text())["rows"]
    assert f"{exact['val_loss']:.3f} exact and {tight['val_loss']:.3f} tight" in DOCS
    recipe = json.loads((results / "2026-11-15-recipe-124m-h200.json").read_text())
    for row in recipe["rows"]:
        assert f"{row['contender']} {row['val_loss']:.3f}" in DOCS
    large = json.loads((results / "2026-11-15-memory-speed-large-h200.json").read_text())
    for row in large["summary"]:
        pinned = f"{row['host_pinned_gib']:.1f} GiB " if row["host_pinned_gib"] else ""
        cells = f"| {row['peak_allocated_gib']:.2f} GiB | {pinned}| {row['tokens_per_s']:,} |"
        assert cells in DOCS, row["label"]
    kernels = json.loads((results / "2026-11-15-loss-kernels-h200.json").read_text())
    for contender, chunk in (("chunked-triton addmm", 4096), ("whole", None), ("liger_x8", None)):
        (row,) = (
            r
            for r in kernels["rows"]
            if (r["contender"], r.get("chunk"), r.get("vocab")) == (contender, chunk, 50304)
        )
        assert f"{row['ms']:.2f} ms in {row['extra_mib']:,.0f} MiB" in DOCS
    older = ("2026-11-17-prepare-2-cores", "2026-11-15-prepare-16-cores")
    for name in ("2026-11-19-prepare-2-cores", *older):
        prepared = json.loads((results / f"{name}.json").read_text())
        ours = prepared["speed"]["prepare"]
        assert f"{ours['tokens_per_s'] / 1e6:.1f}M tokens/s ({ours['mb_per_s']:.0f} MB/s" in DOCS
        if name in older:
            continue
        alone = prepared["speed"]["fastokens str"]
        assert f"{alone['prepare_reaches']:.2f} of its encoder alone" in DOCS
        assert f"{alone['prepare_reaches_at_best']:.2f} at best of {len(ours['all'])} rounds" in DOCS
        peaks = [prepared["memory"][size]["kernel_peak_mb_of_the_process"] for size in ("500 MB", "1 GB")]
        for size, peak in zip(("500 MB", "1 GB"), peaks, strict=True):
            assert f"{peak} MB for {size}" in DOCS
        # What prepare is to reach: 70% of the encoder, 1.5 GB, and no more for twice the input.
        assert alone["same_number_of_tokens"] and alone["prepare_reaches"] >= 0.7
        assert max(peaks) < 1500 and abs(peaks[1] / peaks[0] - 1) <= 0.1
    exact = json.loads((results / "2026-11-17-exact-ids.json").read_text())
    assert all(exact["bins"]["same"].values())
    assert exact["paragraphs"]["different"] == exact["traps"]["different"] == 0
    for number in (exact["bins"]["documents"], exact["paragraphs"]["texts"], exact["traps"]["texts"]):
        assert f"{number:,}" in DOCS
