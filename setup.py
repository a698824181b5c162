"""The description of the wheel, which pyproject.toml cannot say: the README with links that lead somewhere.

Links of the README go to files beside it. A package index has none of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

# Where the repository's files can be read, with a slash at the end; empty until there is such a place. Links
# are left out then, and their words stay.
HOME = ""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")


def description(readme: str, home: str = HOME) -> str:
    """The README for readers who have no files beside it."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if home:
            return f"{picture}[{words}]({home}{path})"
        return "" if picture else words

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, readme))


if __name__ == "__main__":
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(text), long_description_content_type="text/markdown")
