"""Columns by their names: what programs, tables and people in three languages call a step, a loss, a rate."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STEP = word_set(
    "step steps iter iters iteration iterations it s paso pasos iteracion iteraciones schritt "
    "schritte update updates batches"
)
# "max steps", "per step", "every 500 steps", "warmup steps" are no place in a run.
_NO_STEP = word_set(
    "per max total warmup eval save saving logging log num number accumulation accum decay every last "
    "remaining left best micro skipped nan of pro por cada jede alle"
)
_LOSS = word_set("loss losses perdida perdidas verlust nll xent crossentropy")
_TRAIN = word_set("train training trn entren entrenamiento entreno tr trainings lern")
_VAL = word_set(
    "val valid validation validacion eval evaluation test dev held heldout validierung validierungs vali"
)
# Words that may stand beside "loss" and change nothing.
_PLAIN = word_set(
    "lm avg average mean batch running smoothed smooth current cross entropy ce step token nats raw "
    "de final global model mittlerer medio media in out set the la der den final"
)
_JOINED = {
    "trainingsverlust": "train loss", "trainverlust": "train loss", "trainloss": "train loss",
    "validierungsverlust": "val loss", "valverlust": "val loss", "testverlust": "val loss",
    "valloss": "val loss", "evalloss": "val loss", "trl": "train loss", "tel": "val loss",
    "lernrate": "lr", "gnorm": "grad norm", "gradnorm": "grad norm", "globalstep": "step",
}  # fmt: skip
_EXACT = {
    "lr": "lr", "learning rate": "lr", "tasa de aprendizaje": "lr", "learning rate adam": "lr",
    "norm": "grad_norm", "grad norm": "grad_norm", "gradient norm": "grad_norm",
    "global grad norm": "grad_norm", "norma del gradiente": "grad_norm", "gradientennorm": "grad_norm",
    "norma": "grad_norm", "grad": "grad_norm", "total grad norm": "grad_norm",
    "tok sec": "tokens_per_s", "tok s": "tokens_per_s", "tokens s": "tokens_per_s", "tps": "tokens_per_s",
    "tokens sec": "tokens_per_s", "tokens per second": "tokens_per_s", "tok per sec": "tokens_per_s",
    "tokens per sec": "tokens_per_s", "toks": "tokens_per_s", "tok per s": "tokens_per_s",
    "tokens per s": "tokens_per_s", "tgs": "tokens_per_s",
    "mfu": "mfu", "bf16 mfu": "mfu", "mfu percent": "mfu", "mfu pct": "mfu",
    "tokens": "tokens", "tokens seen": "tokens", "consumed tokens": "tokens", "total tokens": "tokens",
    "n tokens": "tokens", "train tokens": "tokens", "tokens vistos": "tokens", "gesehene tokens": "tokens",
    "tokens processed": "tokens", "num tokens seen": "tokens",
    "bpb": "bpb", "val bpb": "bpb", "validation bpb": "bpb", "bits per byte": "bpb", "eval bpb": "bpb",
    "time": "ms", "dt": "ms", "iter time": "ms", "step time": "ms", "step avg": "ms", "tiempo": "ms",
    "zeit": "ms", "ms": "ms", "dt ms": "ms", "step ms": "ms", "iter time ms": "ms", "step time ms": "ms",
    "elapsed time per iteration ms": "ms", "time ms": "ms", "ms per step": "ms", "step seconds": "s",
    "time per step": "ms", "time per iteration": "ms", "ms step": "ms", "ms iter": "ms", "zeit ms": "ms",
    "elapsed time per iteration": "ms", "tiempo ms": "ms", "ms it": "ms", "dauer": "ms", "dauer ms": "ms",
    "epoch": "epoch", "epoche": "epoch", "epoca": "epoch",
}  # fmt: skip
_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Small letters without accents."""
    plain = (
        unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode() if not text.isascii() else text
    )
    found = [_JOINED.get(word, word) for word in _WORD.findall(plain.lower())]
    return " ".join(found).split()


@lru_cache(maxsize=4096)
def column_of(name: str, *, whole: bool = False) -> str | None:
    """What a number with this name in front is: a column, "step", "s" (seconds of a step), "epoch" or None.

    `whole`: is it a header's cell, in which every word counts? In a line, others may stand in front.
    """
    if " - " in name:
        name = name.rpartition(" - ")[2]  # as W&B exports it: the run's name in front
    said = words(name)[-8:]
    if not said:
        return None
    if whole and {"min", "max"} & set(said) and "__" in name:
        return None
    if (
        said[-1] in _STEP
        and (len(said[-1]) > 2 or len(said) == 1)
        and not (len(said) > 1 and said[-2] in _NO_STEP)
    ):
        return "step" if not whole or len(said) <= 2 else None
    for first in range(len(said)) if not whole else (0,):
        if (known := _EXACT.get(" ".join(said[first:]))) is not None:
            # "time per step", "grad norm" and the like, but not "total time", "params norm", "train time".
            before = said[first - 1] if first else ""
            may_follow = known in ("lr", "mfu", "tokens_per_s") or (known == "bpb" and before not in _TRAIN)
            return known if not before or may_follow else None
    return _loss(said, whole=whole)


def _loss(said: list[str], *, whole: bool) -> str | None:
    """train, val or loss, where that is all the words say."""
    sides = {"train" if word in _TRAIN else "val" for word in said if word in _TRAIN or word in _VAL}
    others = [w for w in said if w not in _LOSS and w not in _TRAIN and w not in _VAL and w not in _PLAIN]
    if not any(word in _LOSS for word in said):
        # "val" alone is a loss in a table that has steps.
        alone = len(said) == 1 and said[0] not in ("eval", "evaluation", "test", "dev")
        return sides.pop() + "?" if len(sides) == 1 and alone else None
    if not whole:
        # Of a line's words only those from the last unknown one on: "Saved with val loss".
        at = max((place for place, word in enumerate(said) if word in others), default=-1)
        if at >= 0:
            if said[at] in _OF_ANOTHER_LOSS or not any(word in _LOSS for word in said[at + 1 :]):
                return None
            return _loss(said[at + 1 :], whole=True)
    elif others or len(sides) > 1:
        return None
    return sides.pop() if len(sides) == 1 else "loss"


# What makes another loss of it, or another moment's.
_OF_ANOTHER_LOSS = word_set(
    "aux auxiliary z best min max lowest kl mtp balancing balance moe router contrastive policy value "
    "scale distill distillation ema mejor beste initial inicial expected ctc reward target previous "
    "old new bits ppl perplexity acc accuracy regularization sft dpo box cls mask dice"
)
