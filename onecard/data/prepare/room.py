"""How much of a disk prepare may fill: never all of it, for others write there too."""

from __future__ import annotations

import shutil
from pathlib import Path

from onecard.errors import UserError
from onecard.language import _

_LEFT_ALONE = 2**30
# A small disk, or one that is nearly full already, still takes a small dataset.
_SHARE_LEFT_ALONE = 0.05
# For what is written between two looks, and by the command that then ends.
_LEAST = 32 * 2**20


class Room:
    """The disk that a folder is on, as full as it is when this begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        free = shutil.disk_usage(folder).free
        self.left_alone = max(_LEAST, min(_LEFT_ALONE, int(free * _SHARE_LEFT_ALONE)))

    def free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def is_used_up(self) -> bool:
        return self.free() < self.left_alone

    def used_up(self, what: str, hint: str) -> UserError:
        """`what` could not be done for want of room."""
        return UserError(
            _("the disk is nearly full: {what}").format(what=what),
            _("{free:.2f} GB are free, and prepare leaves {left_alone:.2f} GB alone").format(
                free=self.free() / 1e9, left_alone=self.left_alone / 1e9
            ),
            hint,
        )
