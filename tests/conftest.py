"""What several rooms' tests share. Imports only what the GPU machine has too."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# Before anything imports torch: one thread a process, or parallel test workers fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Sentences are compared in English, whatever the locale of the machine.
os.environ["ONECARD_LANG"] = "en"
# No test may reach a service outside.
os.environ["HF_HUB_OFFLINE"] = "1"

with contextlib.suppress(ImportError):  # the GPU machine need not have it
    from hypothesis import HealthCheck, settings

    # The same examples every time, so that what passes here passes when it is to land. New ones are looked
    # for on purpose: `make fuzz`. A busy machine that makes examples slowly is no failure.
    slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, **slow_is_fine)
    # Said outright: where CI is in the environment, hypothesis derandomizes by itself.
    settings.register_profile("fuzz", derandomize=False, print_blob=True, **slow_is_fine)
    settings.load_profile("same")


@pytest.hookimpl(trylast=True)  # hypothesis' own plugin has by now loaded the profile that was asked for
def pytest_configure() -> None:
    """Derandomized or not, hypothesis tries numbers and strings that it reads in the modules imported so far.
    What ran before on the same worker, or a constant changed in another room, would change the examples.
    """
    with contextlib.suppress(ImportError):
        from hypothesis.internal.conjecture.providers import HypothesisProvider
        from hypothesis.internal.constants_ast import Constants

        if settings().derandomize:
            HypothesisProvider._local_constants = Constants()


@pytest.fixture(autouse=True)
def without_a_users_config(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has told `onecard config` on this machine is not read, and not written."""
    monkeypatch.setenv("ONECARD_CONFIG", str(tmp_path_factory.getbasetemp() / "none" / "config.toml"))


@pytest.fixture(autouse=True)
def as_wide_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs several tests at a time tells each how wide his own terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def little_garbage() -> Iterator[None]:
    """Whenever memory runs out the trainer looks for garbage, and a test process holds many times what a
    trainer does: what is there before these tests is left out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a small learnable data set, as nanoGPT's commands expect."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onecard.train.retries._WAIT", 0.0)  # seconds in which others may give memory back
    write_bins(tmp_path / "data" / "tiny", train=6_000, val=1_500)
    return tmp_path


def learnable_tokens(count: int, vocab: int = 61, seed: int = 0) -> np.ndarray:
    """Tokens that mostly follow from the one before, so that a few steps lower the loss."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, vocab, count)
    surprise = random.random(count) < 0.15
    tokens = np.empty(count, dtype=np.uint16)
    tokens[0] = 1
    for i in range(1, count):
        tokens[i] = noise[i] if surprise[i] else (int(tokens[i - 1]) * 5 + 1) % vocab
    return tokens


class MemoryTokens:
    """Learnable tokens in memory, with the interface of a token file."""

    def __init__(self, count: int) -> None:
        self.tokens = learnable_tokens(count).astype(np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def gather(self, positions: np.ndarray, length: int) -> np.ndarray:
        return np.stack([self.tokens[p : p + length] for p in positions])

    def refresh(self) -> int:
        return len(self)


def write_bins(folder: Path, *, train: int, val: int, vocab: int = 61) -> None:
    """nanoGPT's own layout: headerless uint16, no meta.json."""
    folder.mkdir(parents=True, exist_ok=True)
    learnable_tokens(train, vocab, seed=1).tofile(folder / "train.bin")
    learnable_tokens(val, vocab, seed=2).tofile(folder / "val.bin")
