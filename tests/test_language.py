"""The reader's language: how it is chosen, and catalogues that are whole and say what the code says."""

from __future__ import annotations

import ast
import copy
import gettext
import importlib.util
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onecard import language
from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.cli import main
from onecard.errors import UserError
from onecard.language import _, english, english_of, ngettext, wanted_language
from onecard.plan.bill import Facts, host_lines, training_bill
from onecard.plan.others import names as names_of_others
from onecard.plan.others import nanogpt_step
from onecard.plan.others.bills import bill_of_trainer
from onecard.plan.others.huggingface_step import LlamaShape
from onecard.plan.others.nanogpt import nanogpt_bill
from onecard.plan.search import Question, by_kind, settings, stages
from onecard.plan.tables import grouped, setting_name
from onecard.run.directory import RunDirectory
from onecard.run.metrics import Recorder

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("ONECARD_LANG", "LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
OTHERS = ("es", "de")

LOG = "".join(
    ["step 0: train loss 10.9, val loss 10.9\n", "iter 0: loss 10.9, time 154425.28ms, mfu -100.00%\n"]
    + [f"iter {n}: loss {9 - n / 100:.4f}, time {4300 + n}.00ms, mfu 11.50%\n" for n in range(10, 150, 10)]
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("babel", reason="the catalogues are checked with Babel, of the dev extra")
    spec = importlib.util.spec_from_file_location("catalogues", ROOT / "tools" / "catalogues.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- which language -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "en"),
        ({"ONECARD_LANG": "es"}, "es"),
        ({"ONECARD_LANG": "DE"}, "de"),
        ({"ONECARD_LANG": "en", "LANG": "de_DE.UTF-8"}, "en"),
        ({"ONECARD_LANG": "", "LANG": "de_DE.UTF-8"}, "de"),
        ({"ONECARD_LANG": "es", "LANGUAGE": "de", "LC_ALL": "C"}, "es"),
        ({"LANGUAGE": "fr:es:de"}, "es"),
        ({"LANGUAGE": "fr_FR:de_AT:en"}, "de"),
        ({"LANGUAGE": "C:de"}, "en"),
        ({"LANGUAGE": "en:de"}, "en"),
        ({"LANGUAGE": "de", "LC_ALL": "es_MX.UTF-8"}, "de"),
        ({"LC_ALL": "es_MX.UTF-8", "LANG": "de_DE.UTF-8"}, "es"),
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "en"),
        ({"LC_ALL": "C.UTF-8", "LANG": "de_DE.UTF-8"}, "en"),
        ({"LC_ALL": "POSIX", "LANG": "es_ES"}, "en"),
        ({"LC_MESSAGES": "de_CH.UTF-8", "LANG": "es_ES.UTF-8"}, "de"),
        ({"LANG": "de_DE@euro"}, "de"),
        ({"LANG": "es-AR"}, "es"),
        ({"LANG": "fr_FR.UTF-8"}, "en"),
        ({"ONECARD_LANG": "klingon", "LANG": "de_DE"}, "en"),
        ({"ONECARD_LANG": "../../es"}, "en"),
        ({"LANGUAGE": ":::"}, "en"),
    ],
)
def test_which_language(variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted_language() == wanted


def test_a_changed_variable_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for name in ("es", "de", "fr", "es", "en"):
        monkeypatch.setenv("ONECARD_LANG", name)
        said.append((_("gradients"), ngettext("{n:,} step", "{n:,} steps", 1).format(n=1)))
    spanish, german, english_ = ("gradientes", "1 paso"), ("Gradienten", "1 Schritt"), ("gradients", "1 step")
    assert said == [spanish, german, english_, spanish, english_]


def test_english_for_programs_ends_where_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    with english(False):
        assert _("gradients") == "Gradienten"
    with pytest.raises(ZeroDivisionError), english():
        assert _("gradients") == "gradients"
        with english(False):
            assert _("gradients") == "gradients"
        raise ZeroDivisionError
    assert _("gradients") == "Gradienten"


@pytest.mark.parametrize(("count", "spanish"), [(0, "pasos"), (1, "paso"), (2, "pasos"), (1000, "pasos")])
def test_one_and_many(count: int, spanish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "es")
    assert ngettext("{n:,} step", "{n:,} steps", count) == "{n:,} " + spanish


def test_the_languages_are_those_with_catalogues() -> None:
    there = {path.parts[-3] for path in language.CATALOGUES.glob("*/LC_MESSAGES/onecard.mo")}
    assert {"en", *there} == set(language.LANGUAGES)


# --- the catalogues -----------------------------------------------------------------------------


def entries(tool: ModuleType, name: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    from babel.messages.pofile import read_po

    with tool.po_path(name).open("rb") as file:
        catalogue = read_po(file)
    for message in catalogue:
        if message.id:
            ids = message.id if isinstance(message.id, tuple) else (message.id,)
            strings = message.string if isinstance(message.string, tuple) else (message.string,)
            yield ids, strings, message


def test_the_files_are_what_make_catalogues_writes(tool: ModuleType) -> None:
    """The template is a fresh extraction, the .po files are in step with it, the .mo files with these."""
    stale = [path.name for path, wanted in tool.files().items() if path.read_bytes() != wanted]
    assert stale == [], "make catalogues"


def test_the_files_know_nothing_of_the_machine_or_the_day(tool: ModuleType) -> None:
    for path, content in tool.files().items():
        assert not re.search(rb"-Date:|Babel|/(home|tmp|work|root)/|\.py:\d", content), path


@pytest.mark.parametrize("name", OTHERS)
def test_every_sentence_is_translated(tool: ModuleType, name: str) -> None:
    found = list(entries(tool, name))
    assert len(found) > 200
    assert [ids[0] for ids, strings, _message in found if not all(strings)] == []
    assert [ids[0] for ids, _strings, message in found if message.fuzzy] == []
    assert [ids[0] for ids, strings, _message in found if len(strings) != len(ids)] == []


@pytest.mark.parametrize("name", OTHERS)
def test_translations_keep_what_is_not_language(tool: ModuleType, name: str) -> None:
    """Placeholders with their formats, options, commands, and the spaces that join sentences."""
    for ids, strings, _message in entries(tool, name):
        for said, translated in zip(ids, strings, strict=True):
            assert placeholders(said) == placeholders(translated), said
            for pattern in (r"--[a-z][a-z_-]+", r"`[^`]+`", r"\b[a-z]+_[a-z_]+\b", r"\d[\d.,]*\d"):
                assert sorted(re.findall(pattern, said)) == sorted(re.findall(pattern, translated)), said
            assert said[:1].isspace() == translated[:1].isspace()
            assert said[-1].isspace() == translated[-1].isspace()
            assert (said[-1] in ".?:") == (translated[-1] in ".?:"), said
            in_brackets = [re.findall(r"\[[^]]*\]", text) for text in (said, translated)]
            assert in_brackets[0] == in_brackets[1]  # rich would read others as a colour


def placeholders(text: str) -> list[tuple[str, str | None, str | None]]:
    parts = string.Formatter().parse(text)
    return sorted((name, form, how) for _text, name, form, how in parts if name is not None)


def test_the_check_of_placeholders_sees_a_changed_format() -> None:
    assert placeholders("{n:.2f} of {m}") == placeholders("{m} hat {n:.2f}")
    assert placeholders("{n:.2f}") != placeholders("{n:.1f}") and placeholders("{n}") != placeholders("{m}")


def test_a_new_sentence_is_left_empty_and_stays_english(tool: ModuleType) -> None:
    template = tool.extracted()
    template.add("a sentence of tomorrow")
    catalogue = tool.updated("es", template, tool.po_path("es").read_bytes())
    assert not catalogue.get("a sentence of tomorrow").string
    assert catalogue.get("gradients").string == "gradientes"
    assert b"a sentence of tomorrow" not in tool.as_mo(catalogue)


def test_nothing_to_translate_hides_in_an_f_string() -> None:
    """Extraction does not look inside f-strings before Python 3.12."""
    hidden = []
    for path in (ROOT / "onecard").rglob("*.py"):
        for text in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(text, ast.JoinedStr):
                hidden += [(path.name, call.lineno) for call in ast.walk(text) if _translates_literal(call)]
    assert hidden == []


def _translates_literal(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("_", "ngettext")
        and isinstance(node.args[0], ast.Constant)
    )


# --- names that are keys elsewhere --------------------------------------------------------------


def translated() -> set[str]:
    """Names that have translations in all languages."""
    catalogues = [gettext.translation("onecard", language.CATALOGUES, [other]) for other in OTHERS]
    return set.intersection(*({k for k, v in c._catalog.items() if v} for c in catalogues))  # type: ignore[attr-defined]


SHAPES: tuple[Shape, ...] = (
    GPT2Shape(32, 4, 128, 512, 64, False),
    NanochatShape(32, 1, 128, 512, 64),
    Nanochat2026Shape(32, 1, 128, 512, 64),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.arch)
def test_every_line_of_a_bill_can_be_translated_and_has_a_place_in_the_bar(shape: Shape) -> None:
    known, moments = translated(), set()
    for micro, chunk, recompute, offload, masters, compiled, graphs, dropout, sampled, evaluated in product(
        (1, 8), (128, 8), ("none", "mlp", "block"), ("none", "optimizer", "gradients"), ("fp32", "bf16"),
        (True, False), (True, False), (0.0, 0.1), (0, 64), (1, 64),
    ):  # fmt: skip
        setting = Setting(micro, chunk, recompute, offload, masters, "fp32", compiled, graphs)
        bill = training_bill(
            shape, setting, facts=Facts(by_muon=graphs, dropout=dropout, sample_tokens=sampled,
            evaluation_sequences=evaluated),
        )  # fmt: skip
        moments.add(bill.worst.name)
        lines = (*bill.all_lines(), *host_lines(bill))
        assert {line.name for line in lines} | {m.name for m in bill.moments} <= known
        groups = grouped(bill.all_lines())
        assert {name for name, _lines in groups} <= known
        assert sum(len(members) for _name, members in groups) == len(bill.all_lines())
    assert {"evaluation", "backward pass of a layer", "sampling"} <= moments


def test_every_line_of_nanogpts_bill_can_be_translated() -> None:
    known = translated()
    names = {v for k, v in vars(nanogpt_step).items() if k.isupper() and isinstance(v, str)}
    assert len(names) == 29
    assert names <= known
    shape = GPT2Shape(2, 2, 64, 512, 64, True)
    for dtype, compiled, dropout in product(("bfloat16", "float32"), (True, False), (0.0, 0.1)):
        bill = nanogpt_bill(shape, 4, dtype=dtype, compiled=compiled, dropout=dropout)
        assert {bill.moment, *(line.name for line in bill.lines)} <= known


def test_every_line_of_other_trainers_bills_can_be_translated() -> None:
    known = translated()
    assert {v for k, v in vars(names_of_others).items() if k.isupper() and isinstance(v, str)} <= known
    nanochat = [NanochatShape.of_depth(2, 512, 64), Nanochat2026Shape.of_depth(2, 512, 512)]
    bills = [
        bill_of_trainer("nanochat", shape, 2, dtype=dtype, compiled=compiled)
        for shape, dtype, compiled in product(nanochat, ("bfloat16", "float32"), (True, False))
    ]
    for shape in (GPT2Shape(2, 2, 64, 512, 64, True), LlamaShape(2, 2, 64, 128, 512, 64)):
        bills += [bill_of_trainer("huggingface", shape, 2, checkpointing=one) for one in (True, False)]
    for bill in bills:
        assert {bill.moment, *(line.name for line in bill.lines)} <= known


def test_every_setting_and_stage_is_named_in_the_readers_language(monkeypatch: pytest.MonkeyPatch) -> None:
    from onecard.config.run import RunConfig
    from onecard.hardware.cards import find_card
    from onecard.plan.rates import rates_of

    config = RunConfig()
    question = Question(
        config, config.shape(50304), "bfloat16", rates_of(find_card("RTX 4070"), "bfloat16"), 2**40, None,
        (8, 6),
    )  # fmt: skip
    names = {name for name, _choice in by_kind(question)}
    assert len(names) == 18
    for setting in settings(config, question.shape):
        if setting.micro_batch == 8:
            names |= {name for name, _choice in stages(question, question.answer(setting))}
    assert {"start", "compile", "micro-batch 8", "nothing computed twice", "loss chunk 4,096"} <= names
    monkeypatch.setenv("ONECARD_LANG", "en")
    assert {setting_name(name) for name in names} == names
    for other in OTHERS:
        monkeypatch.setenv("ONECARD_LANG", other)
        for name in names:
            for part, said in zip(name.split(", "), setting_name(name).split(", "), strict=True):
                assert part != said
                figures = [figure.replace(",", ".") for figure in re.findall(r"[\d,]+$", part)]
                assert figures == re.findall(r"[\d.,]+$", said)


# --- at the door --------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


PLAN = ("plan", "--gpu=4070", "--max_iters=100", "--warmup_iters=10")
WORDS = {
    "en": ("Fits: ", "optimizer states", "Settings, predicted", "exact, offload optimizer", "turn on",
           "tokens a step"),
    "es": ("Cabe: ", "estados del optimizador", "Ajustes, previsto",
           "exacto, descarga (optimizer)", "activar", "tokens por paso"),
    "de": ("Passt: ", "Zustände des Optimizers", "Einstellungen, vorhergesagt",
           "exakt, Auslagerung (optimizer)", "einschalten", "Tokens pro Schritt"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_plan_speaks(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ONECARD_LANG", name)
    text = told(capsys, *PLAN, "--compare", "--stages", "--memory")
    for other, words in WORDS.items():
        assert all((word in text) is (other == name) for word in words), other


_ENGLISH = r"\b(parameters|layers|rows|measured|took|pieces|stored|derived|datasheet|unverified|design)\b"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "words",
    [
        (*PLAN, "--formulas"), (*PLAN, "--formulas", "--offload=gradients", "--optimizer=muon"),
        ("gpus", "RTX 4070 Laptop"), ("gpus", "RTX 2070"), ("gpus", "H200"),
    ],
    ids=["formulas", "offloaded", "laptop", "2070", "H200"],
)  # fmt: skip
def test_no_english_is_left_in_formulas_and_remarks(
    name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor a figure in English: 124.373.760 and 0,75."""
    monkeypatch.setenv("ONECARD_LANG", name)
    text = told(capsys, *words)
    assert re.findall(_ENGLISH, text) == []
    if words[0] == "plan":
        assert "124.373.760 " in text and "0,75 GiB; " in text and "124,373,760" not in text


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("words", "spanish", "german"),
    [
        (
            ("--as=nanogpt", "--memory"),
            ("compilado", "las dos medias de AdamW"),
            ("kompiliert", "Mittelwerte"),
        ),
        (("--largest",), ("El modelo más grande", "pocos bits"), ("Das größte Modell", "Low-Bit")),
    ],
)
def test_plan_speaks_of_the_rest_too(
    words: tuple[str, ...], spanish: tuple[str, ...], german: tuple[str, ...], name: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("ONECARD_LANG", name)
    text = told(capsys, *PLAN, *words)
    assert all(word in text for word in (spanish if name == "es" else german))
    assert "low-bit" not in text and "averages" not in text and "loss" not in text


@pytest.mark.parametrize("words", [("--compare", "--stages"), ("--as=nanogpt",), ("--largest",)])
def test_programs_read_the_same_in_every_language(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for name in language.LANGUAGES:
        monkeypatch.setenv("ONECARD_LANG", name)
        answers.append(without_times(told(capsys, *PLAN, *words, "--json")))
    assert answers[0] == answers[1] == answers[2]


def without_times(text: str) -> str:
    assert json.loads(text)
    return re.sub(r'"finish": "[^"]*"', "", text)


def test_eta_speaks_to_people_and_not_to_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(LOG, encoding="utf-8")
    words = ("eta", str(log), "--max-iters", "6000", "--gpu", "RTX 4070")
    heads, programs = [], []
    for name in language.LANGUAGES:
        monkeypatch.setenv("ONECARD_LANG", name)
        heads.append(told(capsys, *words))
        programs.append(without_times(told(capsys, *words, "--json")))
    assert "nanoGPT log: 15 lines" in heads[0] and "nanoGPT divides by" in heads[0]
    assert "registro de nanoGPT: 15 líneas" in heads[1] and "nanoGPT divide por" in heads[1]
    assert "Log von nanoGPT: 15 Zeilen" in heads[2] and "nanoGPT teilt durch" in heads[2]
    assert "evaluations" not in heads[1] + heads[2] and "note:" not in heads[1] + heads[2]
    assert programs[0] == programs[1] == programs[2]
    assert "nanoGPT divides by" in programs[0] and json.loads(programs[0].replace(',\n "loss"', '"loss"'))


@pytest.mark.parametrize(("name", "said"), [("es", "no hay ningún verbo"), ("de", "es gibt kein Verb")])
def test_errors_speak(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONECARD_LANG", name)
    assert main(["plam", "--gpu=4070"]) == 2
    assert f"{said} 'plam'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "labels"),
    [("en", ("error:", "hint:")), ("es", ("error:", "sugerencia:")), ("de", ("Fehler:", "Tipp:"))],
)
def test_labels_of_errors_speak(name: str, labels: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", name)
    first, why, *hints = str(UserError("what", "why", "one\ntwo")).split("\n")
    assert (first, why) == (f"{labels[0]} what", "  why")
    assert hints == [f"{labels[1]} one", " " * len(f"{labels[1]} ") + "two"]


def test_a_sentence_keeps_its_english_for_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    inner = _("{name} is missing").format(name="state.json")
    note = _("{path} is damaged ({why}): step {step:,} is used").format(path="out", why=inner, step=1000)
    assert note == "out ist beschädigt (state.json fehlt): Schritt 1.000 wird benutzt"
    wanted = "out is damaged (state.json is missing): step 1,000 is used"
    assert english_of(note) == english_of(copy.deepcopy(note)) == wanted
    directory = RunDirectory(tmp_path)
    directory.samples.mkdir()
    with Recorder(directory) as recorder:
        recorder.event("note", text=note)
        recorder.log(note)
    assert json.loads(directory.events_path.read_text().splitlines()[-1])["text"] == wanted
    assert directory.log_path.read_text() == wanted + "\n"


# --- everything a person reads ------------------------------------------------------------------

# Rooms in which every sentence of an error goes through gettext.
SPEAKING = (
    "errors", "language", "run", "convert", "generate", "report", "config", "cli", "hardware", "optim",
    "model",
)  # fmt: skip
# A command, or an assignment, is the same in every language.
COMMAND = re.compile(r"(onecard|git|tail|python|pip|--[\w{])(?!.*(, |; |\(| or | works\b| lists\b))")
ERRORS = {
    "UserError",
    "UnknownCardError",
    "SaveError",
    "DamagedConfigError",
    "_DamagedError",
    "TooLargeError",
    "_CannotEvaluateError",
}


def untranslated(source: str) -> list[int]:
    """Lines on which an error is given a sentence as a literal, or `_` something else than a literal."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        if call.func.id in ("_", "N_", "ngettext"):
            found += [call.lineno] * any(not _is_sentence(text) for text in call.args[:1])
        elif call.func.id in ERRORS:
            values = [*call.args, *(word.value for word in call.keywords)]
            found += [part.lineno for value in values for part in _literals(value)]
    return found


def _is_sentence(node: ast.expr) -> bool:
    """A literal; or a name that holds one marked with N_."""
    return not isinstance(node, ast.JoinedStr | ast.BinOp)


def _literals(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
    else:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr) and isinstance(node, ast.IfExp | ast.BoolOp | ast.BinOp):
                yield from _literals(part)
        return
    # A word that is no name of a variable, and no command.
    if " " in text and re.search(r"(?<!\w)[A-Za-z]{2,}(?!\w)", text) and not COMMAND.match(text):
        yield node


@pytest.mark.parametrize("room", SPEAKING)
def test_every_sentence_of_an_error_can_be_translated(room: str) -> None:
    place = ROOT / "onecard" / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert paths
    assert [(path.name, line) for path in paths for line in untranslated(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        'UserError("it is gone")', 'UserError(_("gone"), f"{path} is gone")',
        'UserError(what, hint="try it again")',
        'UserError("it is " + name)', 'UserError(_("gone"), "" if x else "not there")', '_(f"{n} days")',
        'UserError(_("gone"), hint="--fresh, or another folder")',
    ],
)  # fmt: skip
def test_the_check_of_errors_sees(source: str) -> None:
    assert untranslated(source)


@pytest.mark.parametrize(
    "source",
    [
        'UserError(_("it is gone"), str(error), f"onecard train --out_dir={path}")',
        'UserError(_("a"), hint="--fresh")', 'UserError(_("a"), "batch_size × block_size")',
        'UserError(_("{n} days").format(n=3), "a" if x else "")',
    ],
)  # fmt: skip
def test_the_check_of_errors_leaves_commands_alone(source: str) -> None:
    assert not untranslated(source)


def test_a_terminal_without_accents_costs_characters_and_not_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONECARD_LANG": "es", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "onecard", *PLAN], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Previsto seg?n" in done.stdout


def test_babel_is_not_needed_to_speak(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['babel'] = None\nfrom onecard.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONECARD_LANG": "de"}
    done = subprocess.run(
        [sys.executable, "-c", code, *PLAN], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Passt: " in done.stdout
