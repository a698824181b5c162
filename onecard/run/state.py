"""What a checkpoint's state.json may say: anybody can write one, with a manifest that agrees with it."""

from __future__ import annotations

from typing import Any

_KINDS = {
    "arch": (str,), "shape": (dict,), "config": (dict,), "position": (dict,), "scaler": (dict,),
    "dataset": (str, type(None)), "tokenizer": (dict, type(None)), "set_by_user": (dict,),
}  # fmt: skip
NEEDED = ("arch", "shape", "config", "position", "scaler")
_LARGEST_SCALE = 2.0**126


def problem_of(state: dict[str, Any]) -> str | None:
    """The first entry that is of another kind than it has to be; None where all are as they should be."""
    for name, kinds in _KINDS.items():
        if name in state and not isinstance(state[name], kinds):
            return name
    if not is_number_or_none(state.get("val_loss")):
        return "val_loss"
    if not all(isinstance(origin, str) for origin in state.get("set_by_user", {}).values()):
        return "set_by_user"
    return None if _is_scale(state.get("scaler", {})) else "scaler"


def is_number_or_none(value: object) -> bool:
    """A loss, say; NaN and infinity are numbers that a run can come to."""
    if value is None or isinstance(value, float):
        return True
    return type(value) is int and abs(value) < 2**63


def is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_scale(values: dict[str, Any]) -> bool:
    if not values:
        return True
    scale = values.get("scale")
    if not isinstance(scale, float | int) or isinstance(scale, bool) or not 0 < scale < _LARGEST_SCALE:
        return False  # NaN is in no range
    return is_count(values.get("good_steps"))
