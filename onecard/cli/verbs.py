"""The verbs: what each takes, and which room does it. Rooms are imported when a verb is run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from onecard.cli.configs import config_of_sample, config_to_plan
from onecard.cli.parser import Verb
from onecard.config.knobs import Config, knobs, load_config, option
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.data.prepare.options import PrepareOptions
from onecard.doctor.options import Options as DoctorOptions
from onecard.errors import UserError, need_package
from onecard.language import N_, _, english
from onecard.plan.options import Options as PlanOptions
from onecard.report.options import ReportOptions
from onecard.terminal import folded, say, show, show_json

INTERRUPTED = 130
_AS_JSON = N_("print the facts as JSON, for programs")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Config):
    groups: ClassVar[tuple[str, ...]] = (N_("a job that is running"), "options")

    # fmt: off
    pause: bool = option("bool", "the job in --out_dir frees the card and keeps its state in RAM", group="a job that is running")
    resume_now: bool = option("bool", "the paused job takes the card again and goes on", group="a job that is running")
    json: bool = option("bool", "print the summary as JSON, for programs")
    # fmt: on

    def check(self) -> None:
        if self.pause and self.resume_now:
            raise UserError(_("--pause and --resume-now do not go together"), hint=_("keep one of them"))


@dataclass(frozen=True, kw_only=True)
class NoOptions(Config):
    """Of verbs that take the knobs of their config alone."""


@dataclass(frozen=True, kw_only=True)
class GpusOptions(Config):
    all: bool = option("bool", "the figures of all known cards")
    json: bool = option("bool", _AS_JSON)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Config):
    # fmt: off
    seconds: float = option("float", "about how many seconds to measure", default=20.0, low=1, high=600, value="N")
    device: str = option("str", "auto, cuda, cuda:N; or cpu, which measures the processor in small sizes", default="auto", value="NAME")
    power_limits: str | None = option("str", "compare power limits instead, in watts: 200,170,140. You set each one with the command it names; it measures TFLOPS and watts, and changes no setting itself", value="W,W,...")
    json: bool = option("bool", _AS_JSON)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class EtaOptions(Config):
    # fmt: off
    gpu: str | None = option("str", "the card, such as \"RTX 4070\"; the one the log names, or this machine's, unless given", value="CARD")
    max_iters: int | None = option("int", "how long the run is, where the log does not say it", low=1, value="N")
    tokens: int | None = option("tokens", "the same in tokens: 3.2B", low=1, value="N")
    batch_size: int | None = option("int", "sequences per micro-batch, where the log does not say the tokens of an iteration", low=1, value="N")
    block_size: int | None = option("int", "tokens per sequence", low=1, value="N")
    gradient_accumulation_steps: int | None = option("int", "micro-batches per iteration", low=1, value="N")
    gpus: int | None = option("int", "how many cards the run is on, where the log does not say it", low=1, high=2**16, value="N")
    eval_every: int | None = option("int", "steps between evaluations, where the log does not show them", low=1, value="N")
    eval_tokens: int | None = option("tokens", "tokens of one evaluation: 41.9M", low=1, value="N")
    config: str | None = option("str", "the run's config file: says all of these, and the model's shape", value="FILE")
    json: bool = option("bool", _AS_JSON)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Config):
    # fmt: off
    step: int | None = option("int", "which checkpoint; the one `sample` would use unless given", low=0, value="N")
    to: str | None = option("str", "huggingface (a folder) or nanogpt (a ckpt.pt); by the name of TARGET unless given", choices=("huggingface", "nanogpt"), value="NAME")
    # fmt: on


class HasJson(Protocol):
    def to_json(self) -> Any: ...


def names_of(cls: type[Config]) -> frozenset[str]:
    return frozenset(f.name for f in knobs(cls))


def prepare(options: PrepareOptions, inputs: list[str]) -> int:
    need_package("numpy", "train", _("preparing data"))
    from onecard.data.prepare.command import prepare as run_prepare
    from onecard.data.prepare.outcome import summary
    from onecard.data.prepare.request import checked_root, dataset_name, named_dataset

    if options.check_:
        from onecard.data.check.report import check as run_check

        given = Path(inputs[0]) if inputs else Path()
        is_dataset = options.name is None and (given / "train.bin").exists()
        named = named_dataset(inputs, options.dump, options.edu)
        folder = checked_root(options.out_root) / dataset_name(inputs, options.name, named)
        report = run_check(given if is_dataset else folder)
        _show(report, options.json, report.text)
        return 0 if report.ok else 1
    facts = run_prepare(inputs, options)
    _show(facts, options.json, lambda: summary(facts))
    return 0


def _show(facts: HasJson, as_json: bool, text: Callable[[], str]) -> None:
    if as_json:
        show_json(json.dumps(facts.to_json(), indent=1))
    else:
        show(text())


def plan(options: PlanOptions, words: list[str]) -> int:
    from onecard.cli.remembered import with_remembered
    from onecard.plan.command import plan_command

    return plan_command(with_remembered(options), words, config_to_plan)


def config(options: NoOptions, words: list[str]) -> int:
    from onecard.cli.remembered import config_command

    return config_command(words)


def train(options: TrainOptions, words: list[str]) -> int:
    from onecard.run.directory import RunDirectory, load_run_config, refuse_a_slip

    config = load_run_config(words, also_known=names_of(SampleConfig))
    if options.pause or options.resume_now:
        from onecard.run.pause import ask_to_go_on, ask_to_pause

        directory = RunDirectory(config.out_dir)
        if options.pause:
            show(ask_to_pause(directory, say=say))
        else:
            show(ask_to_go_on(directory))
        return 0
    refuse_a_slip(config)
    need_package("torch", "train", _("training"))
    from onecard.train.interrupt import nothing_to_save

    with english(options.json), nothing_to_save():
        if sys.stderr.isatty():  # which takes seconds, and shows nothing
            say(_("loading torch ..."))
        from onecard.train.loop import train as run_training

        summary = run_training(config)
        try:
            if options.json:
                show_json(json.dumps(summary.values))
            else:
                show(folded(summary.text()))
            sys.stdout.flush()
        except OSError:
            # A terminal that was closed, a reader that ended with the same Ctrl-C: the run is saved, and its exit
            # code says how it ended. What is left in the buffer must not be tried again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return INTERRUPTED if summary.interrupted else 1 if summary.risen else 0


def sample(options: NoOptions, words: list[str]) -> int:
    config = load_config(SampleConfig, config_of_sample(words), also_known=names_of(RunConfig))
    need_package("torch", "train", _("sampling"))
    from onecard.generate.sample import sample_command

    return sample_command(config)


def export(options: ExportOptions, words: list[str]) -> int:
    need_package("torch", "train", _("exporting"))
    from onecard.run.export import export_run

    out_dir, target = words
    to = options.to or ("nanogpt" if target.endswith(".pt") else "huggingface")

    def note(text: str) -> None:
        say(_("note: {text}").format(text=text))

    exported = export_run(out_dir, target, step=options.step, to=to, note=note)
    show(exported.written)
    if sys.stderr.isatty():  # a person looks on
        say(exported.next)
    return 0


def eta(options: EtaOptions, words: list[str]) -> int:
    from onecard.cli.remembered import remembered_card
    from onecard.report.eta.eta_command import eta_command
    from onecard.report.gathering.known import Known

    known = Known(
        max_iters=options.max_iters,
        tokens=options.tokens,
        batch_size=options.batch_size,
        block_size=options.block_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        cards=options.gpus,
        eval_tokens=options.eval_tokens,
        eval_every=options.eval_every,
    )
    return eta_command(
        words[0], known, config_file=options.config, gpu=options.gpu, as_json=options.json,
        usual_gpu=remembered_card() if options.gpu is None else None,
    )  # fmt: skip


def report(options: ReportOptions, words: list[str]) -> int:
    from onecard.cli.remembered import remembered_card, with_remembered
    from onecard.report.report_command import report_command

    options = with_remembered(options, ("price", "currency"))
    return report_command(words, options, remembered_card() if options.gpu is None else None)


def doctor(options: DoctorOptions, words: list[str]) -> int:
    from onecard.cli.remembered import remembered_card
    from onecard.doctor.command import doctor_command

    usual = remembered_card() if options.gpu is None else None
    return doctor_command(words[0] if words else None, options, usual)


def gpus(options: GpusOptions, words: list[str]) -> int:
    from onecard.hardware.show import gpus_command

    return gpus_command(words[0] if words else None, everything=options.all, as_json=options.json)


def bench(options: BenchOptions, words: list[str]) -> int:
    need_package("torch", "train", _("measuring a card"))
    from onecard.hardware.bench_show import bench_command

    return bench_command(
        words[0] if words else None, seconds=options.seconds, device=options.device, as_json=options.json,
        power_limits=options.power_limits,
    )  # fmt: skip


_ETA_ABOUT = N_(
    "The time of a step is the median of the log's lines; those of the warm-up and of evaluations do not count, "
    "and the evaluations to come are added at the end. The range says how far off that median may be: twice its "
    "standard error, and at least 2% (5% with fewer than 20 lines, 10% with fewer than 5). The latest pace and "
    "the mean of all lines are always inside it."
)
_REPORT_ABOUT = N_(
    "A verdict in two sentences, what speaks for it, mistakes with the line to change, a forecast as a range, and "
    "what to do next. Exit code 0: healthy, also where something could be better. 1: not healthy."
)
_DOCTOR_ABOUT = N_(
    "What happened, the figures that show it, cures that plan has checked, and what does not help although it is "
    "said to. Of an answer in English, Spanish or German every line of config and every figure that can be computed "
    "is. Exit code 0: it is known what happened. 1: it is not, or something on this machine is wrong."
)
_INPUTS = N_(
    "files or folders of text, jsonl or parquet, plain or .gz or .zst; or a name: fineweb, openwebtext, "
    "tinystories, climbmix, shakespeare, shakespeare_char, or stdlib, this Python's own sources"
)
# In the order of use, which is the front page's.
VERBS = {verb.name: verb for verb in (
    Verb("prepare", N_("text into training tokens under data/NAME"), "FILES|NAME", PrepareOptions, prepare,
         (("FILES, NAME", _INPUTS),), 0, None,
         about=N_("Killed or interrupted, the same command goes on. Run again with more --tokens or more files, "
                  "it appends to what is there.")),
    Verb("plan", N_("will it fit, how fast, how long, at what cost"), "CONFIG.py|RUN", PlanOptions, plan,
         (("CONFIG.py, RUN", N_("a config as train takes it; or the folder of a run that would go on")),),
         config=RunConfig, about=N_("Exit code 0: it fits. 1: it does not.")),
    Verb("train", N_("train; nanoGPT's configs and flags as they are"), "CONFIG.py", TrainOptions, train,
         (("CONFIG.py", N_("a file of name = value lines; onecard train --out_dir=RUN alone goes on with a run")),),
         config=RunConfig,
         about=N_("Ctrl-C saves and ends; the same command goes on. kill -USR1 PID saves now, and trains on.")),
    Verb("sample", N_("generate text with a run's model"), "RUN [\"TEXT\"]", NoOptions, sample,
         (("RUN", N_("the folder of a run: out unless given")), ("\"TEXT\"", N_("what the text begins with"))),
         config=SampleConfig),
    Verb("export", N_("a run's model for Hugging Face or nanoGPT"), "RUN TARGET", ExportOptions, export,
         (("RUN", N_("the folder of a run")),
          ("TARGET", N_("a new folder (Hugging Face) or a file such as ckpt.pt (nanoGPT)"))), 2, 2),
    Verb("eta", N_("a log's true speed and MFU; when it will be done"), "LOG|RUN|-", EtaOptions, eta,
         (("LOG, RUN, -", N_("a log of nanoGPT, nanochat, onecard or the Hugging Face Trainer; a run's folder; "
                             "or - to paste one")),), 1, 1, about=_ETA_ABOUT),
    Verb("report", N_("is it healthy, where will it end, what next"), "RUN|LOG|-", ReportOptions, report,
         (("RUN, LOG, -", N_("a run's folder; a log of any trainer, or a table; or - to paste one. Several are "
                             "compared")),), 1, None, about=_REPORT_ABOUT),
    Verb("doctor", N_("what went wrong, what cures it, which advice is true"), "[FILE|RUN|-]", DoctorOptions, doctor,
         (("FILE, RUN, -", N_("an error, a log, or an answer that you were given; a run's folder; or - to paste one. "
                              "Without any: this machine")),), 0, 1, about=_DOCTOR_ABOUT),
    Verb("gpus", N_("this machine's card, and figures of known ones"), "[CARD]", GpusOptions, gpus,
         (("CARD", N_("one card, as people say it: 4070, \"rtx4070 laptop\"")),), 0, 1),
    Verb("config", N_("the card and prices that plan and eta use"), "[NAME=VALUE]", NoOptions, config,
         (("NAME=VALUE", N_("gpu, host_ram (GiB), price (of a kWh, or a range), currency; NAME= forgets it")),),
         0, None, about=N_("What is given on the command line wins over it.")),
    Verb("bench", N_("measure this machine's card, in about 20 s"), "[CONFIG.py]", BenchOptions, bench,
         (("CONFIG.py", N_("a run's config, whose width and vocabulary are measured besides the usual ones")),),
         0, 1),
)}  # fmt: skip
# Verbs to come: who asks for one gets to know that it is not there yet, not that it is a slip.
NOT_YET = ("make", "tune", "chat", "serve", "eval", "status", "ui")
