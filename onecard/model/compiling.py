"""Can torch.compile work on this machine, where does it keep what it compiled, and how much was that?"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from onecard.errors import UserError

# Of one function. A layer's backward pass: micro-batches of up to five sizes, each with a ragged last one,
# in three ways to recompute. Its forward pass: as many sizes in training and in evaluation, and evaluations
# that had to be made smaller. More means that something unforeseen changes from call to call.
_MOST_SHAPES = 48
# A library that has been empty for so long is nobody's work in progress.
_COMPILING_SECONDS = 30.0
_kinds_of_layers = 1  # each has the shapes above


def limit_recompiling(kinds: int | None = None) -> None:
    """More shapes than foreseen are an error, not a silent fall to uncompiled code (with fullgraph).

    The compiler's settings belong to a thread, and backward passes on a GPU have one of their own: there
    this is called again, and does nothing where nothing is compiled.
    """
    global _kinds_of_layers
    _kinds_of_layers = kinds or _kinds_of_layers
    most = _MOST_SHAPES * _kinds_of_layers
    if "torch._dynamo" in sys.modules and torch._dynamo.config.recompile_limit != most:
        torch._dynamo.config.recompile_limit = most


def graphs_compiled() -> int:
    """In this process so far, from the cache or anew: every shape of every compiled function counts."""
    if "torch._dynamo" not in sys.modules:  # importing it would take longer than the answer is worth
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def too_many_shapes(error: BaseException) -> UserError | None:
    """The compiler's limit as a person may meet it, or None for any other error."""
    if type(error).__name__ != "FailOnRecompileLimitHit":  # by name, for the same reason
        return None
    return UserError(
        f"a compiled function was called with more than {_MOST_SHAPES * _kinds_of_layers} different shapes",
        "each is compiled anew; going on uncompiled would be several times slower",
        "--no-compile goes on without; please report it, this should not happen",
        exit_code=1,
    )


def set_compile_cache() -> None:
    """Keep compiled code between runs and reboots, unless the user has named a folder for it."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # Importing the compiler names torch's own, which is temporary.
    temporary = str(Path(tempfile.gettempdir()) / "torchinductor_")
    if named is None or named.startswith(temporary):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        ours = base / "onecard" / "compiled"
        try:
            ours.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # torch's own will do
        named = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ours)
    _remove_unfinished(named)


def _remove_unfinished(folder: str) -> None:
    """What a compilation that was interrupted has left: it would be taken for finished, and fail to load."""
    # os.walk passes over folders that vanish meanwhile: other processes compile too.
    for where, _folders, names in os.walk(folder):
        for path in (Path(where, name) for name in names if name.endswith(".so")):
            with contextlib.suppress(OSError):
                found = path.stat()
                if not found.st_size and time.time() - found.st_mtime > _COMPILING_SECONDS:
                    path.unlink()


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
