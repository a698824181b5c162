"""Memory that is not the card's: the host's, the disk's, shared memory between processes, a kernel's own."""

from __future__ import annotations

import re

from onecard.doctor.diagnosis import Diagnosis, Evidence
from onecard.doctor.out_of_memory import OutOfMemory
from onecard.language import N_, _

# By kind of message: its key, what happened, what to do.
_OTHERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "host": (
        "host-memory",
        N_("The host's memory (RAM) ran out, not the card's."),
        (
            N_("fewer data workers, smaller shards, or close other programs; free -h shows what is left"),
            N_("WSL takes half of the RAM unless memory= in .wslconfig says more"),
        ),
    ),
    "disk": (
        "disk-full",
        N_("The disk is full."),
        (N_("make room: a checkpoint of nanoGPT has 12 bytes a parameter; onecard keeps three"),),
    ),
    "shm": (
        "shared-memory",
        N_("Shared memory between processes (/dev/shm) ran out, not the card's."),
        (N_("in Docker: --shm-size=8g or --ipc=host; else fewer data workers"),),
    ),
    "triton": (
        "kernel-resources",
        N_("A kernel wants more shared memory than this card has; its memory is not full."),
        (
            N_("another torch, whose kernels know this card: pip install --upgrade torch"),
            N_("until then: compile = False, or without mode='max-autotune'"),
        ),
    ),
}
_RESOURCES = re.compile(r"Required: ?(\d{1,9}),? Hardware limit: ?(\d{1,9})")


def of_other_memory(message: OutOfMemory) -> Diagnosis | None:
    """None where it is the card's."""
    if message.kind not in _OTHERS:
        return None
    key, what, advice = _OTHERS[message.kind]
    evidence = [Evidence("", of=message.words[:240])]
    if found := _RESOURCES.search(message.words):
        text = _("{need:,} bytes are wanted, a multiprocessor of this card has {there:,}")
        evidence.insert(0, Evidence(text.format(need=int(found[1]), there=int(found[2]))))
    elif message.tried is not None:
        text = _("{n:.2f} GiB were wanted").format(n=message.tried.middle / 2**30)
        evidence.insert(0, Evidence(text))
    return Diagnosis(
        key, _(what), tuple(evidence), advice=tuple(_(line) for line in advice), next="onecard doctor"
    )
