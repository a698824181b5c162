"""Can torch.compile work on this machine, and where does it keep what it compiled?"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def set_compile_cache() -> None:
    """Keep compiled code between runs and reboots (the default folder is under /tmp)."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "onecard" / "compiled")


def compile_problem(device: str) -> str | None:
    """Why torch.compile cannot work here, or None. Found out by compiling a one-line function.

    Looking for a compiler on the PATH is not enough: a compiler without Python's headers, or a
    Triton without a compiler for its launcher, fails only when used.
    """
    set_compile_cache()

    def probe(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x + 1)

    try:
        torch.compile(probe, dynamic=False)(torch.zeros(64, device=device))
    # Whatever the toolchain throws, the answer is the same: run eager, and tell why.
    except Exception as error:
        return _first_line(error)
    finally:
        torch.compiler.reset()
    return None


def _first_line(error: Exception) -> str:
    """The line that names the cause, out of an inductor error of a hundred lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if any(w in line.lower() for w in ("compiler", "no such file", "python.h", "g++", "gcc"))
    ]
    return (telling or lines or [type(error).__name__])[0][:300]
