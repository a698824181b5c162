"""`onecard eta`: a log in, an answer for people or programs out."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError
from onecard.files import open_plain
from onecard.hardware.cards import Card, find_card, match_rates
from onecard.hardware.machine import local_gpus
from onecard.language import _, english, ngettext, number
from onecard.report.eta import Eta, Range, estimate
from onecard.report.known import Known
from onecard.report.log_patterns import TRAINER
from onecard.report.log_text import MAX_BYTES, decode
from onecard.report.logs import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD, Log, read_log
from onecard.report.mfu import percent
from onecard.report.run_folder import run_folder
from onecard.run.directory import RunDirectory
from onecard.run.pause import is_paused
from onecard.terminal import columns, hanging, say, show, show_json
from onecard.train.pace import duration

WIDTH = 100
PROGRAMS = {
    NANOGPT: "nanoGPT", NANOCHAT: "nanochat", NANOCHAT_2025: "nanochat (2025)", ONECARD: "onecard",
    HUGGINGFACE: "Hugging Face Trainer",
}  # fmt: skip


def eta_command(
    source: str, known: Known, *, config_file: str | None, gpu: str | None, as_json: bool,
    usual_gpu: str | None = None,
) -> int:  # fmt: skip
    """`usual_gpu` counts where neither `gpu` nor the log says which card it is."""
    with english(as_json):
        return _eta(source, known, config_file, gpu, as_json, usual_gpu)


def _eta(
    source: str, known: Known, config_file: str | None, gpu: str | None, as_json: bool, usual_gpu: str | None
) -> int:
    card = match_rates(gpu) or find_card(gpu) if gpu is not None else None
    known = _with_config(known, config_file)
    text = decode(_content(source))
    log = read_log(text)
    if log is None and TRAINER.search(text):
        raise UserError(
            _("in {source} are losses of the Hugging Face Trainer, but no times").format(
                source=_name(source)
            ),
            _("times are in its progress bar alone"),
            _("add a line of that: {line}").format(line="10%|█ | 500/5000 [12:34<1:53:06,  1.51s/it]"),
            exit_code=1,
        )
    if log is None:
        raise UserError(
            _("no training lines were found in {source}").format(source=_name(source)),
            _("known are those of nanoGPT, nanochat, onecard and the Hugging Face Trainer"),
            _("such a line is: {line}").format(line="iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%"),
            exit_code=1,
        )
    damage = ""
    if (folder := run_folder(source)) is not None:
        log = folder.since_last_start(log)
        if known.config is None:
            config, damage = folder.config(), folder.damage()
            known, log = replace(known, config=config), folder.facts_for(log, config)
            damage = "; ".join(filter(None, (damage, folder.damaged_data(config))))
    found = estimate(log, replace(known, card=card or _card_of(log, usual_gpu)))
    before = tuple(note for note in (_pause_of(source), damage) if note)
    found = replace(found, notes=(*before, *found.notes))
    now = datetime.now().astimezone()
    if as_json:
        show_json(json.dumps(_strict(to_json(found, now)), indent=1, allow_nan=False))
    else:
        show(to_text(found, now))
    return 0


def _content(source: str) -> bytes:
    """One byte more than a log may have is enough to refuse it."""
    if source == "-":
        if sys.stdin.isatty():
            say(_("paste the log, then press Ctrl-D (on Windows Ctrl-Z and Enter)"))
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    path = Path(source)
    of_a_run = path.is_dir() and (path / "log.txt").exists()
    try:
        # A person may name a pipe, such as <(ssh HOST cat LOG); in a run's folder none belongs.
        with open_plain(path / "log.txt") if of_a_run else path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(
            _("there is no log {path}").format(path=source), hint=_("`onecard eta -` reads what you paste")
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            _("{path} cannot be read").format(path=source), str(getattr(error, "strerror", None) or error)
        ) from None


def _name(source: str) -> str:
    return _("what was pasted") if source == "-" else source


def _with_config(known: Known, config_file: str | None) -> Known:
    if known.tokens is not None and known.max_iters is not None:
        raise UserError(_("--tokens and --max-iters both say when the run ends"), hint=_("keep one of them"))
    if config_file is None:
        return known
    others = frozenset(field.name for field in knobs(SampleConfig))
    return replace(known, config=load_config(RunConfig, [config_file], also_known=others))


def _pause_of(source: str) -> str:
    """A note that the run is paused; empty where it is not, or where that cannot be known."""
    if source == "-" or not Path(source).is_dir() or not is_paused(RunDirectory(source)):
        return ""
    note = _("the run is paused: the time left counts from when it goes on (onecard train {how})")
    return note.format(how=f"--out_dir={source} --resume-now")


def _card_of(log: Log, usual_gpu: str | None) -> Card | None:
    """The card the log names, else the usual one, else this machine's."""
    if log.is_of_cpu:
        return None
    if "gpu" in log.facts:
        return match_rates(str(log.facts["gpu"]))
    if log.format == ONECARD and all(mfu is None for mfu in log.steps.mfus):
        return None  # it ran on a CPU, or on a card nobody knows
    if usual_gpu is not None:
        return match_rates(usual_gpu)
    return next((gpu.card for gpu in local_gpus()), None)


# --- for programs -------------------------------------------------------------------------------


def to_json(found: Eta, now: datetime) -> dict[str, Any]:
    """Shares are fractions: 0.62 is 62%."""
    step, left = found.step_ms, found.remaining_s
    return {
        "format": found.log.format,
        "steps_seen": len(found.log.steps),
        "steps_used": found.steps_used,
        "last_seen": found.log.steps[-1].number,
        "max_iters": found.last_step,
        "steps_left": found.steps_left if found.last_step is not None else None,
        "step_ms": {"median": step.mid, "low": step.low, "high": step.high},
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_s": found.tokens_per_s,
        "tflops": found.flops_per_s / 1e12 if found.flops_per_s else None,
        "card": found.card.name if found.card else None,
        "peak_tflops": found.peak_flops / 1e12 if found.peak_flops else None,
        "mfu": found.mfu,
        "log_mfu": found.log_mfu,
        "mfu_explanation": found.mfu_explanation,
        "evaluations_left": found.evaluations_left,
        "evaluation_s": vars(found.evaluation_s),
        "remaining_s": {"mid": left.mid, "low": left.low, "high": left.high} if left else None,
        "finish": _later(now, left.mid).isoformat(timespec="seconds") if left and found.steps_left else None,
        "loss": found.loss,
        "notes": list(found.notes),
    }


def _strict(value: Any) -> Any:
    """The same with null for what JSON has no number for, such as a product of two absurd ones in a log."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _later(now: datetime, seconds: float) -> datetime:
    try:
        return now + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=now.tzinfo)


# --- for people ---------------------------------------------------------------------------------


def to_text(found: Eta, now: datetime) -> str:
    log = found.log
    if found.last_step is None:
        head = ngettext(
            "{program} log: {lines:,} line, of step {last:,}",
            "{program} log: {lines:,} lines, up to step {last:,}",
            len(log.steps),
        )
    else:
        head = ngettext(
            "{program} log: {lines:,} line, step {last:,} of {total:,}",
            "{program} log: {lines:,} lines, steps {first:,} to {last:,} of {total:,}",
            len(log.steps),
        )
    head = head.format(
        program=PROGRAMS[log.format], lines=len(log.steps), first=log.steps[0].number,
        last=log.steps[-1].number, total=found.last_step,
    )  # fmt: skip
    if log.starts > 1:
        head += _(" (the last of {n} starts)").format(n=log.starts)
    rows = [(_("step"), _step_text(found))]
    speeds = [_("{n:,} tokens/s").format(n=_rounded(found.tokens_per_s))] if found.tokens_per_s else []
    if found.flops_per_s:
        small = found.flops_per_s < 1e12
        flops = number(found.flops_per_s / (1e9 if small else 1e12), ".1f")
        speeds.append(f"{flops} {'GFLOPS' if small else 'TFLOPS'}")
    if speeds:
        rows.append((_("speed"), ", ".join(speeds)))
    if found.mfu is not None:
        rows.append((_("true MFU"), _mfu_text(found)))
    rows += _time_rows(found, now)
    if found.loss is not None:
        rows.append((_("loss"), number(found.loss, ".4f")))
    wide = max(len(name) for name, _text in rows)
    lines = _paragraph(head)
    for name, text in rows:
        lines += hanging(f"  {name:<{wide}}  {text}", columns(of_a_pipe=WIDTH), wide + 4)
    if found.log_mfu is not None:
        sentence = _("the log's MFU ({percent}): {why}")
        lines += _paragraph(sentence.format(percent=percent(found.log_mfu), why=found.mfu_explanation))
    lines += [line for note in found.notes for line in _paragraph(_("note: {text}").format(text=note))]
    return "\n".join(lines)


def _step_text(found: Eta) -> str:
    left_out = len(found.log.steps) - found.steps_used
    text = f"{_seconds(found.step_ms)}: " + ngettext(
        "median of {n:,} line", "median of {n:,} lines", found.steps_used
    ).format(n=found.steps_used)
    if left_out:
        text += _(", {n:,} of warm-up and evaluations left out").format(n=left_out)
    return text


def _seconds(value: Range) -> str:
    unit, factor, digits = ("s", 1e-3, 2) if value.mid >= 1000 else ("ms", 1.0, 1)
    mid, low, high = (number(n * factor, f".{digits}f") for n in (value.mid, value.low, value.high))
    return f"{mid} {unit} ({low} – {high})"


def _mfu_text(found: Eta) -> str:
    assert found.mfu is not None
    if found.card is None or found.peak_flops is None:
        return number(100 * found.mfu, ".1f") + "%"
    return _("{share:.1f}% of {peak:.1f} TFLOPS ({card})").format(
        share=100 * found.mfu, peak=found.peak_flops / 1e12, card=found.card.name
    )


def _time_rows(found: Eta, now: datetime) -> list[tuple[str, str]]:
    if found.remaining_s is None:
        return [
            (_("left"), _("unknown, the log does not say how long the run is: add --max-iters or --tokens"))
        ]
    if not found.steps_left:
        return [(_("left"), _("nothing: the log is at the end of the run"))]
    left = found.remaining_s
    text = f"{duration(left.mid)} ({duration(left.low)} – {duration(left.high)}): " + ngettext(
        "{n:,} step", "{n:,} steps", found.steps_left
    ).format(n=found.steps_left)
    if found.evaluations_left and found.evaluation_s.mid:
        text += ngettext(
            " and {n:,} evaluation of {time}", " and {n:,} evaluations of {time}", found.evaluations_left
        ).format(n=found.evaluations_left, time=duration(found.evaluation_s.mid))
    finish, low, high = (_later(now, seconds) for seconds in (left.mid, left.low, left.high))
    bounds = [f"{bound:{'' if bound.year == finish.year else '%Y-'}%m-%d %H:%M}" for bound in (low, high)]
    when = f"{finish:%Y-%m-%d %H:%M} ({bounds[0]} – {bounds[1]})"
    return [(_("left"), text), (_("done"), when + _(", if the last line is from now"))]


def _rounded(value: float) -> int:
    """Four digits are more than a log is worth."""
    digits = max(0, len(str(int(value))) - 4)
    return round(value / 10**digits) * 10**digits


def _paragraph(text: str) -> list[str]:
    width = min(WIDTH, columns(of_a_pipe=WIDTH))
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
