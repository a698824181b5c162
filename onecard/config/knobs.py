"""How knobs are declared and read: their types and ranges, and who set them. The knobs themselves: run.py.

A config class lists its knobs as fields (`knob(...)`); this module reads files and arguments into it,
checks each value against its knob and remembers where it came from. What a file may contain: files.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from onecard.config.files import (
    COMMAND_LINE,
    FALSE_WORDS,
    MAX_INTEGER,
    TRUE_WORDS,
    Argument,
    Assignment,
    Value,
    did_you_mean,
    parse_argument_text,
    read_config_file,
    shortened,
    shown_origin,
    split_arguments,
)
from onecard.errors import UserError
from onecard.language import N_, _

# As people write them, and as the knobs do; both ways, for some knobs take the short ones.
_SPELLINGS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32",
              "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # fmt: skip

# nanochat's names for which -1 means: find out yourself.
NANOCHATS_AUTO = ("num_iterations", "total_batch_size")


class KnobFacts(TypedDict, total=False):
    """What a knob may declare in addition to its kind, default and text."""

    group: str  # of the help
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    # False: may differ between a run and its continuation without making it another experiment (logging ...).
    changes_result: bool
    alias: str  # another project's name for the knob
    alias_values: Mapping[bool, str]  # the alias is a switch whose two positions mean these
    common: bool  # in --help; all are in --help-all
    knob: bool  # False: an option of a verb, and no part of any run
    value: str  # what an option takes, for the help


_NOTHING_SAID = KnobFacts(
    group=N_("options"), low=None, high=None, choices=(), changes_result=True, alias="", alias_values={},
    common=False, knob=True, value="",
)  # fmt: skip


def knob(kind: str, default: Value, text: str, **facts: Unpack[KnobFacts]) -> Any:
    """A field of a config. `kind` is int, float, bool, str or tokens; default None means auto."""
    if kind in ("int", "tokens"):
        facts.setdefault("high", MAX_INTEGER)
    return dataclasses.field(default=default, metadata={**_NOTHING_SAID, **facts, "kind": kind, "help": text})


def option(kind: str, text: str, *, default: Value = None, **facts: Unpack[KnobFacts]) -> Any:
    """A field of a verb's own options: read like a knob, no part of a run."""
    facts["knob"] = False
    return knob(kind, bool(default) if kind == "bool" else default, text, **facts)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The name behind --. Words of Python's own (as) have an underscore behind them in the code."""
    return field.name.rstrip("_")


def takes_value(cls: type[Config], name: str) -> bool:
    """Does a word follow this flag? Switches stand alone."""
    fields = {flag_of(f): f for f in knobs(cls)}
    return name in fields and fields[name].metadata["kind"] != "bool"


def own_record() -> Any:
    """A field that onecard fills in itself: saved and read with the knobs, and nobody's flag."""
    return dataclasses.field(default=None, metadata={"own": True})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What all configs share: where each value came from, and what the reader should know."""

    foreign: ClassVar[Mapping[str, str]] = {}  # other projects' names, and what to use instead
    groups: ClassVar[tuple[str, ...]] = ()  # of knobs, in --help's order; others follow as declared
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def is_set(self, name: str) -> bool:
        """Did the user pin this value (in a file or on the command line)?"""
        return name in self.origins

    def values(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in _stored(type(self))}

    def check(self) -> None:
        """Raise UserError if values contradict each other. Single values are checked on reading."""

    def resolved(self: C) -> C:
        """The config with knobs that follow from others filled in."""
        return self


C = TypeVar("C", bound=Config)


# --- reading ------------------------------------------------------------------------------------


def knobs(cls: type[Config]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if "kind" in f.metadata]


def _stored(cls: type[Config]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.metadata]


def load_config(
    cls: type[C],
    arguments: Sequence[str],
    also_known: frozenset[str] = frozenset(),
    earlier: Callable[[Mapping[str, Value], Mapping[str, str]], list[Assignment]] | None = None,
    *,
    check: bool = True,
) -> C:
    """Read config files and `--name=value` arguments, later ones overriding earlier ones.

    Names in `also_known` (another command's knobs) may stand in a *file* and are passed over: one
    config file serves train and sample. `earlier` may add values of a run that is continued, given
    what was set now and where; they count as set, and are checked together with the rest.
    Without `check` values may contradict each other.
    """
    fields = {flag_of(f): f for f in knobs(cls)}
    defaults: dict[str, Any] = {name: f.default for name, f in fields.items()}
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []

    def set_value(assignment: Assignment, from_text: bool) -> None:
        off = str(assignment.value).strip() == "-1"
        if off and (assignment.name in NANOCHATS_AUTO or assignment.name in cls.foreign):
            return
        assignment = _own_name(assignment, fields, from_text)
        field = _known_field(assignment, fields, cls.foreign)
        values[field.name] = _typed(field, assignment, from_text)
        origins[field.name] = assignment.origin

    # `--no-compile` reads naturally for booleans.
    aliases = [f.metadata["alias"] for f in fields.values() if f.metadata["alias"]]
    negated = {f"no_{n}": n for n, f in fields.items() if f.metadata["kind"] == "bool"}
    negated |= {f"no_{f.metadata['alias']}": f.metadata["alias"] for f in fields.values()
                if f.metadata["alias_values"]}  # fmt: skip
    by_alias = {f.metadata["alias"]: f for f in fields.values() if not f.metadata["alias_values"]}

    def needs_word(name: str) -> bool:
        field = fields.get(name) or by_alias.get(name)
        return field is not None and field.metadata["kind"] != "bool"

    for argument in split_arguments(arguments, needs_word):
        if argument.name == "":
            parsed = read_config_file(
                str(argument.value), {**dict.fromkeys({*also_known, *aliases}), **defaults, **values}
            )
            notes += parsed.notes
            for assignment in parsed.assignments:
                if assignment.name in fields or assignment.name not in also_known:
                    set_value(assignment, from_text=False)
        elif argument.name in negated and argument.value is None:
            set_value(Assignment(negated[argument.name], False, COMMAND_LINE), from_text=False)
        else:
            set_value(_argument_assignment(argument, fields), from_text=True)
    for assignment in earlier(values, origins) if earlier is not None else ():
        set_value(assignment, from_text=False)
    config = cls(**values, origins=origins, notes=tuple(notes)).resolved()
    if check:
        config.check()
    return config


def from_values(cls: type[C], values: Mapping[str, Any], origins: Mapping[str, str]) -> C:
    """Rebuild a config saved in a run; knobs this version does not know are left out."""
    names = {f.name for f in knobs(cls)}
    known = {name: origin for name, origin in origins.items() if name in names}
    return cls(**{k: v for k, v in values.items() if k in _stored(cls)}, origins=known)


def sound(config: C) -> C:
    """The config, if every value is one that its knob may have; ValueError otherwise.

    from_values takes what stands in a file, and what is computed from it would fail far from here.
    """
    for knob_ in knobs(type(config)):
        value, limits = getattr(config, knob_.name), knob_.metadata
        if value is None and knob_.default is None:
            continue
        kind = limits["kind"]
        kinds = {"bool": bool, "str": str, "float": int | float}.get(kind, int)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(_("{name} is of another kind").format(name=knob_.name))
        if limits["choices"] and value not in limits["choices"]:
            raise ValueError(_("{name} is none of its choices").format(name=knob_.name))
        if isinstance(value, str) or kind == "bool":
            continue
        least, most = limits["low"], limits["high"]
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            raise ValueError(_("{name} is out of its range").format(name=knob_.name))  # NaN is in none
        if not abs(value) <= MAX_INTEGER:
            raise ValueError(_("{name} is too large").format(name=knob_.name))
    if not all(isinstance(text, str) for text in (*config.origins, *config.origins.values())):
        raise ValueError(_("the origin of a value is no text"))
    return config


def _argument_assignment(argument: Argument, fields: Mapping[str, dataclasses.Field[Any]]) -> Assignment:
    if argument.value is not None:
        return Assignment(argument.name, argument.value, COMMAND_LINE)
    if argument.name in fields and fields[argument.name].metadata["kind"] != "bool":
        raise UserError(
            _("--{name} needs a value").format(name=argument.name), hint=f"--{argument.name}=VALUE"
        )
    return Assignment(argument.name, True, COMMAND_LINE)


def _own_name(
    assignment: Assignment, fields: Mapping[str, dataclasses.Field[Any]], from_text: bool
) -> Assignment:
    """The same assignment with our knob's name and value, where it was given by another project's."""
    for name, field in fields.items():
        if assignment.name == field.metadata["alias"] != "":
            if not field.metadata["alias_values"]:
                return Assignment(name, assignment.value, assignment.origin)
            value = assignment.value
            if from_text and isinstance(value, str):
                value = parse_argument_text(value)
            switch = _convert("bool", value)
            if switch is None:
                raise UserError(
                    _("{name} takes True or False, not {value} ({origin})").format(
                        name=assignment.name,
                        value=shortened(assignment.value),
                        origin=shown_origin(assignment.origin),
                    ),
                    hint=_("or use {name}: {names}").format(
                        name=name, names=", ".join(field.metadata["choices"])
                    ),
                )
            return Assignment(name, field.metadata["alias_values"][bool(switch)], assignment.origin)
    return assignment


def _known_field(
    assignment: Assignment, fields: Mapping[str, dataclasses.Field[Any]], foreign: Mapping[str, str]
) -> dataclasses.Field[Any]:
    if assignment.name in fields:
        return fields[assignment.name]
    names = [*fields, *(f.metadata["alias"] for f in fields.values() if f.metadata["alias"])]
    near = difflib.get_close_matches(assignment.name, names, n=2, cutoff=0.6)
    hint = foreign.get(assignment.name, "")
    raise UserError(
        _("there is no knob called '{name}' ({origin})").format(
            name=assignment.name, origin=shown_origin(assignment.origin)
        ),
        hint=_(hint) if hint else did_you_mean(near) or _("--help lists them all"),
    )


def _typed(field: dataclasses.Field[Any], assignment: Assignment, from_text: bool) -> Value:
    """The value in the knob's own type and range, or a UserError that says what it takes."""
    kind, raw = field.metadata["kind"], assignment.value
    value: Value = raw
    if from_text and isinstance(raw, str):
        value = parse_argument_text(raw)
    if field.default is None and (value is None or value == "auto"):
        return None
    if kind == "str" and not isinstance(value, str):
        value = raw  # --out_dir=7 means the text
    converted = _convert(kind, value)
    choices = field.metadata["choices"]
    if choices and isinstance(converted, str):
        word = converted.lower()
        converted = (
            word if word in choices else next((w for w in choices if w == _SPELLINGS.get(word)), converted)
        )
    if converted is None:
        if kind in ("int", "float", "tokens") and re.fullmatch(r"\s*[+-]?\d{19,}\s*", str(raw)):
            raise UserError(_cannot_be(field, raw, assignment), _("that is too large"))
        if choices:
            _check_range(field, str(raw), assignment)
        comma = re.fullmatch(r"\s*\d+,\d+\s*", str(raw)) if kind in ("float", "tokens") else None
        hint = f"--{_shown(field).lstrip('-')}={str(raw).strip().replace(',', '.')}" if comma else ""
        what = _(_TAKES[kind]).format(name=_shown(field), value=shortened(raw))
        raise UserError(_with_origin(field, what, assignment), hint=hint)
    _check_range(field, converted, assignment)
    return converted


def _convert(kind: str, value: Value) -> Value:
    """None when the value cannot be read as this kind."""
    if kind == "bool":
        if isinstance(value, str):
            word = value.strip().lower()
            return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
        return bool(value) if value in (0, 1) else None
    if kind == "str":
        return value if isinstance(value, str) else None
    if kind == "tokens" and isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMbBtT])\s*", value)
        exponents = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}
        count = float(match[1] + exponents[match[2].lower()]) if match else math.inf
        return round(count) if math.isfinite(count) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind == "float":
        return float(value) + 0.0  # nobody wants to read -0.0
    return int(value) if value == int(value) else None


def _shown(field: dataclasses.Field[Any]) -> str:
    name = flag_of(field)
    return name if field.metadata["knob"] else f"--{name.replace('_', '-')}"


_TAKES = {
    "int": N_("{name} takes a whole number, not {value}"),
    "float": N_("{name} takes a number, not {value}"),
    "bool": N_("{name} takes True or False, not {value}"),
    "str": N_("{name} takes text, not {value}"),
    "tokens": N_("{name} takes a number of tokens such as 3.2B, 100M or 5_000_000, not {value}"),
}


def _cannot_be(field: dataclasses.Field[Any], value: Value, assignment: Assignment) -> str:
    what = _("{name} cannot be {value}").format(name=_shown(field), value=shortened(value))
    return _with_origin(field, what, assignment)


def _with_origin(field: dataclasses.Field[Any], what: str, assignment: Assignment) -> str:
    """A knob may stand in a file, which is named; an option was typed just now."""
    return f"{what} ({shown_origin(assignment.origin)})" if field.metadata["knob"] else what


def _check_range(field: dataclasses.Field[Any], value: Value, assignment: Assignment) -> None:
    low, high, choices = field.metadata["low"], field.metadata["high"], field.metadata["choices"]
    what = _cannot_be(field, value, assignment)
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        auto = ["auto"] if field.default is None and field.metadata["knob"] else []
        raise UserError(
            what,
            _("it is one of: {names}").format(names=", ".join([*choices, *auto])),
            did_you_mean(near),
        )
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    outside = (low is not None and value < low) or (high is not None and value > high)
    if outside and not field.metadata["knob"] and None not in (low, high) and high != MAX_INTEGER:
        raise UserError(what, _("it is a number from {low:,} to {high:,}").format(low=low, high=high))
    if low is not None and value < low:
        raise UserError(what, _("the least is {low}").format(low=low))
    if high is not None and value > high:
        raise UserError(what, _("the most is {high}").format(high=high))
