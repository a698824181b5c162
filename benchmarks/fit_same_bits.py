"""The same bits in every run on a card, for the parts of benchmarks/fit.py that compare runs bit for bit.

A card adds in another order every time where many threads add to one place: in an embedding's gradient, in
attention's backward pass. torch has slower ways that do not, when it is told so. Told for training steps
alone: sampling has operations for which there is no such way.

    python benchmarks/fit_same_bits.py WORDS...      (`onecard train WORDS...`, that way)
"""

from __future__ import annotations

import os
import sys
from typing import Any


def same_bits() -> None:
    """For all runs of this process that begin after this, and before CUDA is used in it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from onecard.train import start
    from onecard.train.step import Stepper

    def flash(*sizes: Any) -> str:
        return "flash"  # of the fast kernels the one that has such a way

    plain = Stepper.run

    def run(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return plain(stepper, *arguments, **named)
        finally:
            torch.use_deterministic_algorithms(False)

    if torch.cuda.is_available():
        setattr(start, "choose_kernel", flash)  # noqa: B010
    setattr(Stepper, "run", run)  # noqa: B010


if __name__ == "__main__":
    from onecard.cli import main

    same_bits()
    sys.exit(main(["train", *sys.argv[1:]]))
