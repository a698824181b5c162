"""`onecard plan`: the question put together, the answer printed. Data on stdout, notes on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TextIO

from onecard.config.dataset import data_facts
from onecard.config.run import RunConfig
from onecard.config.vocabulary import other_vocabulary
from onecard.errors import UserError
from onecard.language import _, english, number
from onecard.plan.amounts import count, duration
from onecard.plan.answer import Answer, answer, check_horizon, comparable
from onecard.plan.largest import Size, best_for_time, flags_of, largest_models, longest_blocks
from onecard.plan.lines import GIB
from onecard.plan.machine import Figures, find_target
from onecard.plan.options import Options, budget_seconds
from onecard.plan.scaling import BITS
from onecard.plan.search import kind
from onecard.plan.tables import Row, print_rows
from onecard.plan.verdict import little_to_spare
from onecard.terminal import columns, say, show_json
from onecard.terminal import console as careful_console

_WEEK = 7 * 86400.0
# GiB of memory of a PC that nobody has described: without a limit, the largest model would be one that only
# a server holds.
USUAL_HOST_RAM = 32.0


def plan_command(
    options: Options, words: Sequence[str], load: Callable[[Sequence[str]], tuple[RunConfig, int]]
) -> int:
    """`load` reads a config out of the words, and how many steps of it are done."""
    with english(options.json):
        config, done = load(words)
        return _plan(replace(options, steps_done=done), config)


def _plan(options: Options, config: RunConfig) -> int:
    for note in _notes(config, options):
        say(_("note: {text}").format(text=note))
    figures = Figures(options.tflops, options.bandwidth, options.watts)
    looking_for_sizes = options.largest or options.by is not None
    assumed = looking_for_sizes and options.gpu is not None and options.host_ram is None
    host_ram = USUAL_HOST_RAM if assumed else options.host_ram
    target = find_target(config, options.gpu, host_ram, figures)
    if target.limit is not None and target.limit_beyond_card:
        beyond = _("--vram_limit is {limit:.2f} GiB, and the card has {n:.2f}: that is planned with")
        told = beyond.format(limit=target.limit / GIB, n=target.capacity / GIB)
        say(_("note: {text}").format(text=told))
    now = datetime.now()
    check_horizon(config)
    if options.as_ == "nanogpt":
        from onecard.plan.others.as_nanogpt import as_nanogpt

        return as_nanogpt(config, target, options, now)
    found = answer(config, target, options, now)
    if looking_for_sizes:
        return _show_largest(found, options, now, host_is_assumed=assumed)
    if options.json:
        show_json(json.dumps(found.to_json(), indent=1))
    else:
        from onecard.plan.show import show

        show(found, console())
    return 0 if found.fits else 1


def _notes(config: RunConfig, options: Options) -> list[str]:
    """What to know before the answer is read."""
    notes = list(config.notes)
    data = data_facts(config.dataset)
    if other := other_vocabulary(config, data.vocabulary):
        notes.append(other)
    if data.problem:
        notes.append(data.problem)
    if options.watts is not None:
        notes.append(
            _("--watts counts for energy and money alone: a card held to less power is slower than this")
        )
    if config.eval_only:
        notes.append(
            _(
                "with eval_only=True train would only evaluate: whether it fits, the time and the cost here "
                "are those of training without eval_only"
            )
        )
    return notes


def console() -> Any:
    file: Any = sys.stdout if sys.stdout.isatty() else _Trimmed(sys.stdout)
    return careful_console(file, width=columns(of_a_pipe=160))


class _Trimmed:
    """Without the spaces that fill a table's last column: in a file or an issue they are dirt."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r"[ \t]+(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _show_largest(found: Answer, options: Options, now: datetime, *, host_is_assumed: bool) -> int:
    seconds = budget_seconds(options.by, now) if options.by is not None else _WEEK
    sizes = {"largest": largest_models(found), "longest": longest_blocks(found)}
    candidates = best_for_time(found, seconds, found.data_tokens)
    if options.json:
        told = {name: [size.to_json() for size in rows] for name, rows in sizes.items()}
        best = [candidate.to_json() for candidate in candidates]
        of_host = {"assumed": host_is_assumed, **found.host_to_json()}
        whole = {**told, "best": {"seconds": round(seconds), "models": best}, "host": of_host}
        show_json(json.dumps(whole, indent=1))
        return 0 if sizes["largest"] else 1
    if not sizes["largest"]:
        raise UserError(
            _("not even the smallest model fits into {n:.2f} GiB").format(n=found.target.allowed / GIB),
            exit_code=1,
        )
    from onecard.plan.show import TELLING, plain, speed_unknown, way_name

    out = console()
    have, host = number(found.target.allowed / GIB, ".2f"), found.target.host
    beside = _("the PC's own memory is not looked at (--host-ram GIB)")
    if host_is_assumed:
        beside = _("with {n:.0f} GiB of host memory; --host-ram says otherwise").format(n=USUAL_HOST_RAM)
    elif host is not None:
        beside = _("{n:.0f} GiB of the PC's own memory").format(n=host / GIB)
        if found.target.host_kept:
            kept = found.target.host_kept / GIB
            beside += ", " + _("besides {n:.0f} that are left to the system").format(n=kept)
    out.print(f"[bold]{plain(found.target.card.name)}[/bold], {have} GiB; {beside}", highlight=False)
    tightest = max(size.choice.bill.process for rows in sizes.values() for size in rows)
    if (spare := little_to_spare(found, tightest)) is not None:
        out.print(spare, highlight=False)
    out.print()
    _table_of_sizes(out, _("The largest model"), sizes["largest"])
    if sizes["longest"]:
        grows = found.question.shape.arch == "gpt2"
        note = _("The position embeddings grow with the block, and so do the parameters.") if grows else ""
        _table_of_sizes(out, _("The longest block of this model"), sizes["longest"], note)
    if candidates:
        title = _("The best model for {time}, by expected loss (nats a token, FineWeb)")
        if candidates[0].loss.unit == BITS:
            title = _("The best model for {time}, by expected loss (bits per byte, FineWeb)")
        title = title.format(time=duration(seconds))
        headings = [_("parameters"), _("layers × width"), _("tokens"), _("tokens/s"), _("loss"), "GiB",
                    _("host GiB")]  # fmt: skip
        rows = []
        for candidate in candidates:
            shape, loss = candidate.choice.question.shape, candidate.loss
            figures = (
                count(shape.parameters), f"{shape.n_layer} × {shape.n_embd}",
                count(candidate.tokens), number(candidate.choice.tokens_per_s, ",.0f"),
                number(loss.low, ".2f") + " – " + number(loss.high, ".2f"),
                number(candidate.choice.bill.process / GIB, ".2f"),
                number(candidate.choice.host_bytes / GIB, ".1f") if candidate.choice.bill.host else "",
            )  # fmt: skip
            rows.append(Row(way_name(kind(candidate.choice.setting)), figures, candidate.flags))
        print_rows(out, title, _("way"), headings, rows, _("flags"))
        if candidates[0].evaluation_s > TELLING * seconds:
            share = _("evaluations take {time} of it").format(time=duration(candidates[0].evaluation_s))
            out.print(f"[dim]{share}[/dim]", highlight=False)
        out.print(f"[dim]{candidates[0].loss.basis}[/dim]")
        if candidates[0].not_distinguishable:
            out.print(_("The first rows cannot be told apart: the smaller one is cheaper to use."))
    elif found.question.rates is None:
        out.print(speed_unknown(found), highlight=False)
    elif not comparable(found.question.shape.vocab_size):
        why = _("Which model is best is not told: of losses with a vocabulary of {n:,} nothing is known.")
        out.print(why.format(n=found.question.shape.vocab_size), highlight=False)
    else:
        out.print(_("Not one step of any model is done within {time}.").format(time=duration(seconds)))
    return 0


def _table_of_sizes(out: Any, title: str, sizes: list[Size], note: str = "") -> None:
    headings = [_("parameters"), _("layers × width"), _("block"), "GiB", _("host GiB"), _("tokens/s")]
    rows = []
    for size in sizes:
        choice = size.choice
        shape = choice.question.shape
        figures = (
            count(shape.parameters), f"{shape.n_layer} × {shape.n_embd}", number(shape.block_size, ","),
            number(choice.bill.process / GIB, ".2f"),
            number(choice.host_bytes / GIB, ".1f") if choice.bill.host else "",
            number(choice.tokens_per_s, ",.0f") if choice.step else "-",
        )  # fmt: skip
        rows.append(Row(_(size.kind), figures, flags_of(choice)))
    print_rows(out, title, "", headings, rows, _("flags"))
    if note:
        out.print(f"[dim]{note}[/dim]", highlight=False)
    out.print()
