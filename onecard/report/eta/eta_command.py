"""`onecard eta`: a log in, an answer for people or programs out."""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from onecard.errors import UserError
from onecard.hardware.cards import find_card, match_rates
from onecard.hardware.machine import local_gpus
from onecard.language import _, english, ngettext, number
from onecard.report import reading
from onecard.report.eta.estimate import Eta, estimate
from onecard.report.eta.mfu import minus_hundred, percent
from onecard.report.eta.pace import Range, timed
from onecard.report.gathering.claims import claims_in
from onecard.report.gathering.config_file import config_from
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import (
    HUGGINGFACE,
    NANOCHAT,
    NANOCHAT_2025,
    NANOCHAT_SFT,
    NANOCHATS,
    NANOGPT,
    ONECARD,
    Known,
)
from onecard.report.gathering.run_folder import run_folder
from onecard.report.gathering.source import Source, named, opened
from onecard.report.log import Log
from onecard.report.reading.seeing import seen
from onecard.run.directory import RunDirectory
from onecard.run.pause import is_paused
from onecard.terminal import columns, hanging, show, show_json
from onecard.train.pace import duration

WIDTH = 100
PROGRAMS = {
    NANOGPT: "nanoGPT", NANOCHAT: "nanochat", NANOCHAT_2025: "nanochat (2025)",
    NANOCHAT_SFT: "nanochat (SFT)", ONECARD: "onecard", HUGGINGFACE: "Hugging Face Trainer", "csv": "CSV",
    "jsonl": "JSONL",
}  # fmt: skip
# Whoever pastes an answer pastes a few lines of a log with it.
_MOST_LINES_OF_PROSE = 1000
# The dicts of the Hugging Face Trainer.
_MINUS_HUNDRED = re.compile(r"(?<![\d.])[-\u2212]\s?100(?:[.,]0+)?\s?%")
_TRAINER = re.compile(rb"\{['\"]loss['\"]: ?['\"]?[\d.]")


def eta_command(
    source: str, known: Known, *, config_file: str | None, gpu: str | None, as_json: bool,
    usual_gpu: str | None = None,
) -> int:  # fmt: skip
    """`usual_gpu` counts where neither `gpu` nor the log says which card it is."""
    with english(as_json):
        known = _with_config(known, config_file)
        known = replace(known, card=match_rates(gpu) or find_card(gpu) if gpu is not None else None)
        return _eta(source, known, usual_gpu, as_json)


def _eta(source: str, known: Known, usual_gpu: str | None, as_json: bool) -> int:
    with opened(source) as stream:
        log = _log_of(source, stream)
    if known.card is None:
        usual = match_rates(usual_gpu) if usual_gpu is not None else None
        if usual_gpu is None:
            usual = next((gpu.card for gpu in local_gpus()), None)
        known = replace(known, usual_card=usual)
    found = estimate(facts_of(log, known, run_folder(source)))
    prose = _on_prose(found, stream.content)
    before = tuple(note for note in (_pause_of(source),) if note)
    found = replace(found, notes=(*before, *found.notes, *prose))
    now = datetime.now().astimezone()
    if as_json:
        show_json(json.dumps(_strict(to_json(found, now)), indent=1, allow_nan=False))
    else:
        show(to_text(found, now))
    return 0


def _log_of(source: str, stream: Source) -> Log:
    log = reading.read(stream)
    timeless = log is None or (not len(timed(log.last, 1)) and bool(len(log.steps)))
    if timeless and (_TRAINER.search(stream.content) if log is None else log.format == HUGGINGFACE):
        raise UserError(
            _("in {source} are losses of the Hugging Face Trainer, but no times").format(
                source=named(source)
            ),
            _("times are in its progress bar alone"),
            _("add a line of that: {line}").format(line="10%|█ | 500/5000 [12:34<1:53:06,  1.51s/it]"),
            exit_code=1,
        )
    if log is None:
        if (found := seen(stream.content)).kind == "traceback":
            raise found.error(named(source))
        raise UserError(
            _("no training lines were found in {source}").format(source=named(source)),
            _("known are those of nanoGPT, nanochat, onecard and the Hugging Face Trainer"),
            _("such a line is: {line}").format(line="iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%"),
            exit_code=1,
        )
    return log


def _with_config(known: Known, config_file: str | None) -> Known:
    if known.tokens is not None and known.max_iters is not None:
        raise UserError(_("--tokens and --max-iters both say when the run ends"), hint=_("keep one of them"))
    if config_file is None:
        return known
    config, notes = config_from(config_file)
    return replace(known, config=config, notes=(*known.notes, *notes))


def _on_prose(found: Eta, content: bytes) -> list[str]:
    """Notes on what people write around a log: an MFU of -100%, and claims that this card cannot keep."""
    if found.floor_ms is None or len(found.log.steps) > _MOST_LINES_OF_PROSE or (found.mfu or 0) > 1.05:
        return []  # where the run itself is faster than its card can be, the floor is another run's
    prose = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    notes = [minus_hundred()] if found.log_mfu is None and _MINUS_HUNDRED.search(prose) else []
    claims = claims_in(prose, found.tokens_per_step, found.last_step)
    words = dict.fromkeys(f'"{claim.words}"' for claim in claims if claim.ms < found.floor_ms)
    if not words:
        return notes
    text = _(
        "impossible on this card: {claims}; an iteration takes {floor} at least, {flops:.1f} TFLOP at "
        "{peak:.1f} TFLOPS"
    )
    figures = {
        "floor": _one(found.floor_ms),
        "flops": found.floor_flops / 1e12,
        "peak": found.all_peak / 1e12,
    }
    return [*notes, text.format(claims=", ".join(words), **figures)]


def _pause_of(source: str) -> str:
    """A note that the run is paused; empty where it is not, or where that cannot be known."""
    if source == "-" or not Path(source).is_dir() or not is_paused(RunDirectory(source)):
        return ""
    note = _("the run is paused: the time left counts from when it goes on (onecard train {how})")
    return note.format(how=f"--out_dir={source} --resume-now")


# --- for programs -------------------------------------------------------------------------------


def to_json(found: Eta, now: datetime) -> dict[str, Any]:
    """Shares are fractions: 0.62 is 62%."""
    step, left = found.step_ms, found.remaining_s
    return {
        "format": found.log.format,
        "steps_seen": len(found.log.last.steps),
        "steps_used": found.steps_used,
        "last_seen": found.last_seen,
        "max_iters": found.last_step,
        "steps_left": found.steps_left if found.last_step is not None else None,
        "step_ms": {"median": step.mid, "low": step.low, "high": step.high},
        "floor_ms": found.floor_ms,
        "predicted": found.prediction is not None,
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_s": found.tokens_per_s,
        "tflops": found.flops_per_s / 1e12 if found.flops_per_s else None,
        "card": found.card.name if found.card else None,
        "cards": found.facts.cards,
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
    rows = [(_("step"), _step_text(found))]
    if found.prediction is not None:
        rows.append((_("at least"), _floor_text(found)))
    speeds = [_("{n:,} tokens/s").format(n=_rounded(found.tokens_per_s))] if found.tokens_per_s else []
    if found.flops_per_s:
        small = found.flops_per_s < 1e12
        flops = number(found.flops_per_s / (1e9 if small else 1e12), ".1f")
        speeds.append(f"{flops} {'GFLOPS' if small else 'TFLOPS'}")
    if speeds:
        rows.append((_("speed"), ", ".join(speeds)))
    if found.mfu is not None:
        rows.append((_("true MFU") if found.prediction is None else _("likely MFU"), _mfu_text(found)))
    rows += _time_rows(found, now)
    if found.loss is not None:
        rows.append((_("loss"), number(found.loss, ".4f")))
    if found.prediction is not None and (found.steps_left or found.last_step is None):
        rows.append((_("next"), _next_text(found)))
    wide = max(len(name) for name, _text in rows)
    lines = _paragraph(_head(found))
    for name, text in rows:
        lines += hanging(f"  {name:<{wide}}  {text}", columns(of_a_pipe=WIDTH), wide + 4)
    if found.log_mfu is not None:
        sentence = _("the log's MFU ({percent}): {why}")
        lines += _paragraph(sentence.format(percent=percent(found.log_mfu), why=found.mfu_explanation))
    lines += [line for note in found.notes for line in _paragraph(_("note: {text}").format(text=note))]
    return "\n".join(lines)


def _head(found: Eta) -> str:
    steps = found.log.last.steps
    if not len(steps) or (found.prediction is not None and found.log.format not in PROGRAMS):
        return _("no step with its time yet: an estimate from what is said of the run")
    if found.last_step is None:
        head = ngettext(
            "{program} log: {lines:,} line, of step {last:,}",
            "{program} log: {lines:,} lines, up to step {last:,}",
            len(steps),
        )
    else:
        head = ngettext(
            "{program} log: {lines:,} line, step {last:,} of {total:,}",
            "{program} log: {lines:,} lines, steps {first:,} to {last:,} of {total:,}",
            len(steps),
        )
    head = head.format(
        program=PROGRAMS.get(found.log.format, found.log.format), lines=len(steps), first=int(steps.step[0]),
        last=int(steps.step[-1]), total=found.last_step,
    )  # fmt: skip
    if len(found.log.starts) > 1:
        head += _(" (the last of {n} starts)").format(n=len(found.log.starts))
    return head


def _step_text(found: Eta) -> str:
    if (guess := found.prediction) is not None:
        text = _("{time}: plan's figure for {program}")
        if not guess.program:
            return _("{time}: by the MFU that is said, of an A100's 312 TFLOPS").format(
                time=_seconds(found.step_ms)
            )
        if guess.first_ms is not None:
            text = _(
                "{time}: plan's figure for {program}; the first iteration's {first} are compilation, tuning "
                "and the first data"
            )
        first = _one(guess.first_ms) if guess.first_ms is not None else ""
        return text.format(time=_seconds(found.step_ms), program=guess.program, first=first)
    left_out = len(found.log.last.steps) - found.steps_used
    text = f"{_seconds(found.step_ms)}: " + ngettext(
        "median of {n:,} line", "median of {n:,} lines", found.steps_used
    ).format(n=found.steps_used)
    if left_out > 0:
        text += _(", {n:,} of warm-up and evaluations left out").format(n=left_out)
    return text


def _floor_text(found: Eta) -> str:
    """The arithmetic that no run can beat."""
    assert found.floor_ms is not None
    text = _("{time}: {flops:.1f} TFLOP of an iteration at {peak:.1f} TFLOPS, all that the card can do")
    flops = found.floor_flops / 1e12
    return text.format(time=_one(found.floor_ms), flops=flops, peak=found.all_peak / 1e12)


def _next_text(found: Eta) -> str:
    text = _("paste {n} more lines once they are there, such as `{line}`: the real speed is in them")
    line = "iter 10: loss 9.8765, time 4321.12ms, mfu 11.52%"
    if found.log.format in NANOCHATS:
        line = "step 00010/02520 (0.40%) | loss: 6.123456 | lrm: 0.25 | dt: 1177.12ms | tok/sec: 55,700 | ..."
    return text.format(n=10, line=line)


def _one(ms: float) -> str:
    return f"{number(ms / 1000, '.2f')} s" if ms >= 1000 else f"{number(ms, '.1f')} ms"


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
