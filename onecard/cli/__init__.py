"""The command line: one parser, one verb a room. Heavy imports wait until a verb needs them.

Data goes to stdout, progress and logs to stderr. Exit codes: 0 ok, 1 the answer is no, 2 wrong use,
130 ended by Ctrl-C or a polite kill, 143 by a second polite kill.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

from onecard.errors import EndedAtOnce, UserError
from onecard.language import _
from onecard.terminal import columns, forget_unusable_sizes, say, show

_HELP, _HELP_ALL = ("--help", "-h"), "--help-all"


def main(argv: Sequence[str] | None = None, *, verb: str | None = None) -> int:
    """The command line; with `verb`, one of nanoGPT's doors (train.py, sample.py)."""
    from onecard.cli.verbs import INTERRUPTED

    arguments = [*([verb] if verb else []), *(sys.argv[1:] if argv is None else argv)]
    _tolerant_streams()
    forget_unusable_sizes()
    _limit_spinning()
    try:
        return _run(arguments)
    except UserError as error:
        _say_error(error)
        return error.exit_code
    except KeyboardInterrupt as ended:
        say(_("interrupted"))
        return ended.exit_code if isinstance(ended, EndedAtOnce) else INTERRUPTED
    except BrokenPipeError:
        # `onecard sample | head`: the reader has seen enough.
        sys.stderr.close()
        return 0
    except OSError as error:
        # Full disks, missing rights, names too long: circumstances, reported with the path they concern.
        _say_error(UserError(_("the system refused"), str(error)))
        return 1


def _say_error(error: UserError) -> None:
    say(error.within(columns(sys.maxsize, sys.stderr)))


def _run(arguments: list[str]) -> int:
    from onecard.cli.help import front_page, page
    from onecard.cli.parser import parse
    from onecard.cli.verbs import NOT_YET, VERBS

    if not arguments or arguments[0] in (*_HELP, "help", _HELP_ALL):
        show(front_page(VERBS))
        return 0 if arguments else 2
    name, words = arguments[0], arguments[1:]
    if name == "--version":
        from onecard import __version__

        show(__version__)
        return 0
    if name == "-":
        from onecard.cli.paste import verb_of_paste

        name, words = verb_of_paste(), ["-", *words]
    if name in NOT_YET:
        raise UserError(
            _("onecard {verb} is not here yet").format(verb=name),
            _("it will come with a later version"),
            _("what there is: onecard --help"),
        )
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = _("did you mean {name}?").format(name=near[0]) if near else "onecard --help"
        raise UserError(_("there is no verb '{name}'").format(name=name[:60]), hint=hint)
    if any(word in (*_HELP, _HELP_ALL) for word in words):
        show(page(VERBS[name], everything=_HELP_ALL in words))
        return 0
    options, rest = parse(VERBS[name], words)
    return VERBS[name].run(options, rest)


def _limit_spinning() -> None:
    """Threads that compute on processors wait for each other by asking again and again, for milliseconds.

    With another program on the same processors that is a hundred times slower than waiting (measured:
    docs/lessons.md); asked a thousand times and no more, it costs 3% where nobody else is. Of GNU's OpenMP,
    which torch has on Linux, and before torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _tolerant_streams() -> None:
    """An ASCII terminal or a closed stream must cost characters, not the command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - lives as long as the process
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
