"""torch.compile on this machine: whether it works, where its cache is, and limits to what it compiles."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from onecard.errors import UserError
from onecard.language import _

# Shapes of one function. A layer's backward pass has micro-batches of up to five sizes, each with a smaller
# last one, in three settings of recompute. Its forward pass has as many sizes in training and in evaluation,
# and evaluations that were made smaller. More means that something unexpected changes from call to call.
_MOST_SHAPES = 48
# A library that has been empty for so long belongs to no compilation in progress.
_COMPILING_SECONDS = 30.0
_kinds_of_layers = 1  # each kind has the shapes above


def limit_recompiling(kinds: int | None = None) -> None:
    """Make more shapes than expected an error instead of silently uncompiled code (with fullgraph).

    The compiler's settings belong to a thread, and backward passes on a GPU run in another thread, where this
    is called again. It does nothing where nothing is compiled.
    """
    global _kinds_of_layers
    _kinds_of_layers = kinds or _kinds_of_layers
    most = _MOST_SHAPES * _kinds_of_layers
    if "torch._dynamo" in sys.modules and torch._dynamo.config.recompile_limit != most:
        torch._dynamo.config.recompile_limit = most


def graphs_compiled() -> int:
    """Graphs compiled in this process so far or read from the cache, one per shape of every function."""
    if "torch._dynamo" not in sys.modules:  # not imported for this: it takes seconds
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def too_many_shapes(error: BaseException) -> UserError | None:
    """The message for the compiler's limit, or None for any other error."""
    if type(error).__name__ != "FailOnRecompileLimitHit":  # by name: its module takes seconds to import
        return None
    return UserError(
        _("a compiled function was called with more than {n} different shapes").format(
            n=_MOST_SHAPES * _kinds_of_layers
        ),
        _("each shape is compiled separately; to continue uncompiled would be several times slower"),
        _("--no-compile continues without the compiler; please report it, this should not happen"),
        exit_code=1,
    )


def set_compile_cache() -> None:
    """Keep compiled code between runs and reboots, unless the user has chosen a folder for it."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # Importing the compiler sets the variable to torch's own folder, which is temporary.
    temporary = str(Path(tempfile.gettempdir()) / "torchinductor_")
    if named is None or named.startswith(temporary):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        ours = base / "onecard" / "compiled"
        try:
            ours.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # torch's own folder is good enough
        named = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ours)
    _remove_unfinished(named)


def _remove_unfinished(folder: str) -> None:
    """Remove what an interrupted compilation left: it would look finished, and fail to load."""
    # os.walk skips folders that vanish meanwhile: other processes compile too.
    for where, _folders, names in os.walk(folder):
        for path in (Path(where, name) for name in names if name.endswith(".so")):
            with contextlib.suppress(OSError):
                found = path.stat()
                if not found.st_size and time.time() - found.st_mtime > _COMPILING_SECONDS:
                    path.unlink()


def compile_problem(device: str) -> str | None:
    """Why torch.compile cannot work here, or None. Tested by compiling a one-line function.

    A compiler on the PATH is not enough: one without Python's headers, or a Triton without a compiler for
    its launcher, fails only when used.
    """
    set_compile_cache()

    def probe(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x + 1)

    try:
        torch.compile(probe, dynamic=False)(torch.zeros(64, device=device))
    # Whatever the toolchain raises, the answer is the same: run eager, and say why.
    except Exception as error:
        return _first_line(error)
    finally:
        torch.compiler.reset()
    return None


def _first_line(error: Exception) -> str:
    """The line that names the cause, from an Inductor error of a hundred lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if any(w in line.lower() for w in ("compiler", "no such file", "python.h", "g++", "gcc"))
    ]
    return (named or lines or [type(error).__name__])[0][:300]
