"""One verb per room. Heavy imports wait until a verb needs them: --help must be instant.

Data goes to stdout, progress and logs to stderr. Exit codes: 0 ok, 1 the answer is no, 2 wrong use,
130 ended by Ctrl-C or a polite kill, 143 by a second polite kill.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence

from onecard.config import RunConfig
from onecard.errors import EndedAtOnce, UserError, need_package
from onecard.knobs import Config, describe_knobs, knobs, load_config
from onecard.sample_config import SampleConfig
from onecard.terminal import columns, folded, forget_unusable_sizes, hanging

INTERRUPTED = 130
_KNOB, _LONG = 33, 1000  # columns: where what a knob does begins; a pipe's, where each stays on its line

# Written out rather than generated: this page must come at once, and reads in the order of use.
HELP = """\
onecard: pretrain language models on the one graphics card you own

  onecard prepare FILES...      text into training tokens under data/NAME
                                (or: prepare fineweb --tokens 3.2B)
  onecard plan CONFIG.py        will it fit, how fast, how long, at what cost
  onecard train CONFIG.py       train; nanoGPT's configs and flags as they are
  onecard sample --out_dir=DIR  draw text from a run
  onecard export DIR TARGET     a run's model for Hugging Face or nanoGPT
  onecard eta LOG|-             a log's true speed and MFU; when it will be done
  onecard gpus [CARD]           this machine's card, and figures of known ones
  onecard bench [CONFIG.py]     measure this machine's card, in about 20 s

`onecard VERB --help` explains each.
Try it: onecard prepare stdlib && onecard train config/demo.py"""


def train(arguments: Sequence[str]) -> int:
    """Train; nanoGPT's configs and flags as they are.

    onecard train CONFIG.py [--name=value ...] [--json]

    a running job:
      onecard train --out_dir=FOLDER --pause       lets go of the card
      onecard train --out_dir=FOLDER --resume-now  and takes it again, where it was
      kill -USR1 PID                               saves now, and trains on"""
    as_json = "--json" in arguments
    asked = next((word for word in arguments if word in ("--pause", "--resume-now")), None)
    arguments = [word for word in arguments if word not in ("--json", "--pause", "--resume-now")]
    from onecard.run.directory import RunDirectory, load_run_config, refuse_a_slip

    config = load_run_config(arguments, also_known=_names(SampleConfig))
    if asked is not None:
        from onecard.run.pause import ask_to_go_on, ask_to_pause

        directory = RunDirectory(config.out_dir)
        if asked == "--pause":
            print(ask_to_pause(directory, tell=lambda text: print(text, file=sys.stderr, flush=True)))
        else:
            print(ask_to_go_on(directory))
        return 0
    refuse_a_slip(config)
    need_package("torch", "train", "training")
    from onecard.train.interrupt import nothing_to_save

    with nothing_to_save():
        from onecard.train.loop import train as run_training

        summary = run_training(config)
        try:
            print(json.dumps(summary.values) if as_json else folded(summary.text()), flush=True)
        except OSError:
            # A terminal that was closed, a reader that ended with the same Ctrl-C: the run is saved, and its
            # exit code says how it ended. What is left in the buffer must not be tried again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return INTERRUPTED if summary.interrupted else 1 if summary.risen else 0


def sample(arguments: Sequence[str]) -> int:
    """Draw text from a run: onecard sample --out_dir=FOLDER [--start=TEXT ...]."""
    config = load_config(SampleConfig, arguments, also_known=_names(RunConfig))
    need_package("torch", "train", "sampling")
    from onecard.generate.sample import sample_command

    return sample_command(config)


def plan(arguments: Sequence[str]) -> int:
    """Will it fit, how fast, how long, what will it cost; before it starts.

    onecard plan CONFIG.py [--gpu "RTX 4070"] [...]

    Exit code 0: it fits, 1: it does not.

    the card:
      --gpu NAME                     the card to plan for [this machine's]
      --tflops T                     its rate, where it is not in `onecard gpus`: bf16 with fp32 sums, dense
      --bandwidth GB/S               and of its memory; how much that is: --vram_limit, or a name with "12GB"
      --watts W                      its power limit, for energy and money
      --host-ram GIB                 of its PC, less 2 for its system [this one's; --gpu: any, --largest: 32]

    what to answer:
      --compare                      every way to run it: exact, low-bit, recompute, offload
      --stages                       what to turn on again, in which order, with the gain and memory of each
      --largest                      the largest model and longest block that fit, the best model for a week
      --by TIME                      ... for another time: 12h, 30d, "sunday 20:00", 2027-01-31
      --as nanogpt                   what nanoGPT's own trainer would need, compiled and not
      --formulas                     every line of the bill with its formula
      --json                         everything, for programs

    money:
      --price X                      of a kWh [0.30]
      --currency NAME                of the price [EUR]
      --idle-watts W                 what the PC draws besides the card [80; 25 in a laptop]"""
    from onecard.plan.command import plan_command

    return plan_command(arguments, _config_to_plan)


def _config_to_plan(words: Sequence[str]) -> tuple[RunConfig, int]:
    """As train would read these words, and the steps that are done of a run that would go on. A run's folder
    stands for its --out_dir."""
    from onecard.run.directory import RunDirectory, load_run_config

    folders = [word for word in words if not word.startswith("-") and _is_run(word)]
    if len(folders) > 1:
        raise UserError("one run can be planned at a time", f"these are {len(folders)}: {', '.join(folders)}")
    words = [f"--out_dir={word}" if word in folders else word for word in words]
    also_known = _names(SampleConfig)
    config = load_run_config(words, also_known)
    brought = set(config.origins) - set(load_config(RunConfig, words, also_known).origins)
    if brought and not any(word.startswith("--out_dir") for word in words):
        note = f"the run in {config.out_dir} goes on, with values it was begun with (--fresh plans a new one)"
        config = dataclasses.replace(config, notes=(*config.notes, note))
    goes_on = brought and not config.fresh and config.init_from in ("auto", "resume")
    return config, RunDirectory(config.out_dir).newest_step() if goes_on else 0


def _is_run(word: str) -> bool:
    from onecard.run.directory import RunDirectory

    try:
        return RunDirectory(word).config_path.is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL in it: whoever reads configs says so
        return False


# These take nanoGPT's config files and free --name=value flags, which is config.py's business.
CONFIG_VERBS: dict[str, tuple[Callable[[Sequence[str]], int], type[Config]]] = {
    "plan": (plan, RunConfig),
    "train": (train, RunConfig),
    "sample": (sample, SampleConfig),
}


def _wait_patiently() -> None:
    """Threads that compute on processors wait for each other by asking again and again, for milliseconds.

    Beside another program on the same processors that is a hundred times slower than waiting (measured:
    docs/logbook.md); asked a thousand times and no more, it costs 3% where nobody else is. Of GNU's OpenMP,
    which torch has on Linux, and before torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def main(argv: Sequence[str] | None = None, *, verb: str | None = None) -> int:
    """The command line; with `verb`, one of nanoGPT's doors (train.py, sample.py)."""
    arguments = [*([verb] if verb else []), *(sys.argv[1:] if argv is None else argv)]
    _tolerant_streams()
    forget_unusable_sizes()
    _wait_patiently()
    try:
        if not arguments or arguments[0] in ("--help", "-h", "help"):
            print(HELP)
            return 0 if arguments else 2
        if arguments[0] in CONFIG_VERBS:
            verb, rest = arguments[0], arguments[1:]
            if any(word in ("--help", "-h") for word in rest):
                print(_config_help(verb))
                return 0
            return CONFIG_VERBS[verb][0](rest)
        # cyclopts is loaded for the other verbs only; nanoGPT's two doors do without it.
        from onecard.verbs import run_verb

        return run_verb(arguments, CONFIG_VERBS)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as ended:
        print("interrupted", file=sys.stderr)
        return ended.exit_code if isinstance(ended, EndedAtOnce) else INTERRUPTED
    except BrokenPipeError:
        # `onecard sample | head`: the reader has seen enough.
        sys.stderr.close()
        return 0
    except OSError as error:
        # Full disks, missing rights, names too long: circumstances, told with the path they concern.
        print(UserError("the system refused", str(error)), file=sys.stderr)
        return 1


def _tolerant_streams() -> None:
    """An ASCII terminal or a closed stream must cost characters, not the command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - lives as long as the process
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")


def _names(cls: type[Config]) -> frozenset[str]:
    return frozenset(f.name for f in knobs(cls))


def _config_help(verb: str) -> str:
    function, cls = CONFIG_VERBS[verb]
    lines = [
        *inspect.cleandoc(str(function.__doc__)).splitlines(),
        "",
        "The knobs; --name=value, --name value and --flag are understood, - and _ alike.",
        "",
    ]
    for group, entries in describe_knobs(cls):
        lines.append(f"{group}:")
        for name, default, text in entries:
            lines.append(f"  --{name:<{_KNOB - 5}} {text} [{default}]")
        lines.append("")
    width = columns(of_a_pipe=_LONG)
    fitted = [part for line in lines for part in hanging(line, width, _KNOB if line.startswith("  ") else 0)]
    return "\n".join(fitted).rstrip()
