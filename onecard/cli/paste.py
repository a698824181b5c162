"""`onecard -`: any paste, sent to the verb that answers it."""

from __future__ import annotations

from onecard.doctor.which import MOST, verb_for
from onecard.language import _
from onecard.report.gathering.source import look_at_paste
from onecard.terminal import say


def verb_of_paste() -> str:
    """The paste is looked at here; the verb reads it again."""
    verb = verb_for(look_at_paste(MOST))
    say(_("this is for {command}").format(command=f"onecard {verb} -"))
    return verb
