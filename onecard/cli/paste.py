"""`onecard -`: any paste, sent to the verb that answers it."""

from __future__ import annotations

from onecard.doctor.which import verb_for
from onecard.language import _
from onecard.report.source import content_of
from onecard.terminal import say


def verb_of_paste() -> str:
    """The paste is read here; the verb finds it where it looks for one."""
    verb = verb_for(content_of("-"))
    say(_("this is for {command}").format(command=f"onecard {verb} -"))
    return verb
