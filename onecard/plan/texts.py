"""Which text a dataset is, by its name: an expected loss holds for one text, and for others only roughly.

Losses of the same model differ by text more than by anything that a config says: nanoGPT's 124M ends at 2.85
nats a token on OpenWebText, llm.c's at 3.28 on FineWeb, and stories for children are below 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FITTED = "FineWeb"  # the text whose losses plan/scaling.py predicts


@dataclass(frozen=True)
class Text:
    """A text as published figures name it."""

    name: str
    is_web: bool  # pages of all kinds: what a law of another such text says of it is about right


_FINEWEB = Text(FITTED, is_web=True)
_WEB = ("FineWeb-Edu", "OpenWebText", "ClimbMix", "C4", "SlimPajama", "RedPajama", "RefinedWeb", "DCLM")
# In a name without its signs, the first that fits; what is part of another comes after it.
_KEYS = (
    ("finewebedu", "FineWeb-Edu"), ("edufineweb", "FineWeb-Edu"), ("fwedu", "FineWeb-Edu"),
    ("fineweb", FITTED), ("openwebmath", "OpenWebMath"), ("openwebtext", "OpenWebText"),
    ("climbmix", "ClimbMix"), ("slimpajama", "SlimPajama"), ("redpajama", "RedPajama"),
    ("refinedweb", "RefinedWeb"), ("dclm", "DCLM"), ("shakespeare", "tiny Shakespeare"),
    ("tinystories", "TinyStories"), ("wikitext", "WikiText"), ("enwik8", "enwik8"), ("text8", "text8"),
    ("thestack", "The Stack"), ("starcoder", "StarCoder"), ("smoltalk", "SmolTalk"),
    ("stdlib", "Python's standard library"),
)  # fmt: skip
# So short that they are part of other words.
_WHOLE = {"owt": "OpenWebText", "c4": "C4", "pile": "Pile", "fw": FITTED}


def known_text(dataset: str) -> Text | None:
    """None where the name says nothing; a folder's name may be a path, and have a size or a date in it."""
    words = re.split(r"[^a-z0-9]+", dataset.lower())
    bare = "".join(words)
    name = next((name for key, name in _KEYS if key in bare), None)
    name = name or next((_WHOLE[word] for word in words if word in _WHOLE), None)
    if name is None:
        return None
    return _FINEWEB if name == FITTED else Text(name, is_web=name in _WEB)
