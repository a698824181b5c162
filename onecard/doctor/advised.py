"""What an answer advises: the config as it was, and the stages of the config that it asks for.

Config lines stand in code, lists, tables, diffs and sentences; what a knob was stands in a comment
(`batch_size = 12  # was 16`), before an arrow, or nowhere. English, Spanish and German.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onecard.doctor.frames import Buffer
from onecard.report.reading.head import Value, setting

# Knobs that change what a step needs, how fast it is, or how many tokens it has.
NUMBERS = frozenset(
    (
        "batch_size",
        "gradient_accumulation_steps",
        "block_size",
        "n_layer",
        "n_head",
        "n_embd",
        "vocab_size",
        "depth",
        "max_iters",
        "eval_iters",
        "eval_interval",
    )
)
SHARES = frozenset(("dropout", "learning_rate", "min_lr", "weight_decay", "grad_clip", "beta1", "beta2"))
SWITCHES = frozenset(("compile", "bias"))
WORDS = frozenset(("dtype",))
KNOBS = NUMBERS | SHARES | SWITCHES | WORDS
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
_DTYPES = frozenset(("bfloat16", "float16", "float32"))
# Names as other trainers and people have them.
_NAMES = {
    "grad_acc": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accumulation": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "device_batch_size": "batch_size",
    "torch_compile": "compile",
    "max_seq_len": "block_size",
    "sequence_len": "block_size",
}
_ANY = "|".join(sorted((*KNOBS, *_NAMES), key=len, reverse=True))
_VALUE = r"[\"']?[\w.+-]{1,20}[\"']?(?:\s?\*\s?\d{1,6}){0,3}"
_LINE = re.compile(
    rf"^(?P<sign>[-+]?)[ \t>*]{{0,12}}`?(?:--)?(?P<name>{_ANY})`?\s*[=:]\s*(?P<value>{_VALUE})`?,?"
    r"(?P<rest>\s*(?:$|[#(/<\u2190\u2014\u2013-].{0,300}))$"
)
_FLAG = re.compile(rf"(?<!\S)--(?P<name>{_ANY})[= ](?P<value>{_VALUE})(?![\w.])")
_INLINE = re.compile(rf"(?<![\w.-])(?P<name>{_ANY})\s?=\s?(?P<value>{_VALUE})")
_ROW = re.compile(
    rf"^\|\s*`?(?P<name>{_ANY})`?\s*\|\s*`?(?P<was>{_VALUE})`?\s*\|\s*`?(?P<value>{_VALUE})`?\s*\|"
)
_WAS = re.compile(
    r"\b(?:era|eran|was|were|war|waren|antes|vorher|before|previously|fr[u\u00fc]her|originally|original"
    r"|urspr\S{1,9}lich"
    r"|old|alt|instead of|statt|anstatt|en vez de|en lugar de|in place of|from|desde|von|de|down from"
    r"|up from)\b"
    rf"[ :=(]{{1,3}}(?P<value>{_VALUE})",
    re.IGNORECASE,
)
_ARROW = re.compile(
    rf"(?<![\w.-])`?(?P<name>{_ANY}|batch[ -]size|Batch-?[Gg]r\S{{1,4}}e"
    rf"|tama\S{{1,2}}o de(?:l)? lote)`?\W{{0,4}}"
    r"(?:\b(?:from|von|de|desde)\s)?\s?(?P<was>\d{1,6}|True|False|bfloat16|float16)\s?(?:->|=>|\u2192"
    r"|\bto\b|\bauf\b|\ba\b|\bhasta\b)\s?"
    r"(?P<value>\d{1,6}|True|False|bfloat16|float16)\b",
    re.IGNORECASE,
)
_DO = re.compile(
    r"\b(?:reduce|lower|drop|cut|decrease|set|use|try|raise|increase|baja|reduce|reducir|pon|usa|cambia"
    r"|sube|bajar|senke|reduziere"
    r"|setze|stelle|nutze|verwende|erh\S{1,2}he|probiere?)\b[^.\n]{0,30}?"
    rf"(?P<name>{_ANY}|batch[ -]size|Batch-?[Gg]r\S{{1,4}}e|tama\S{{1,2}}o de(?:l)? lote)`?\W{{0,4}}"
    r"(?:\b(?:to|of|auf|a|en|zu)\s)?\W{0,3}(?P<value>\d{1,6}|True|False|bfloat16|float16)\b",
    re.IGNORECASE,
)
_MINE = re.compile(
    r"\b(?:my|mi|meine?|your current|tu actual|deine aktuelle|current|actual"
    r"|aktuelle?)\b.{0,24}\b(?:config\w*|settings|configuraci\S{1,2}n|Einstellungen)",
    re.IGNORECASE,
)
# Before a command: somebody else's, and not the one that was run.
_SAYS = re.compile(
    r"\b(?:answer|run|use|try|instead|respuesta|ejecuta|usa|prueba|antwort|starte|nutze|verwende|versuch)\b",
    re.IGNORECASE,
)
_MOST_LINES = 1200


@dataclass(frozen=True)
class Change:
    """One line of an advice: a knob's value, with what it was where the line says it."""

    name: str
    value: Value
    was: Value | None = None
    words: str = ""  # unchanged
    told: bool = False  # "reduce it to 8"


@dataclass
class Stage:
    """A config to run in: what differs from the config as it was."""

    values: dict[str, Value]
    words: str = ""  # the sentence before it


@dataclass(frozen=True)
class Advised:
    was: Mapping[str, Value]  # the config as it was, as far as it is known
    stages: tuple[Stage, ...] = ()  # in their order
    lines: tuple[Change, ...] = ()  # each knob that is to change, once, with the first value advised


NOTHING_ADVISED = Advised({})


@dataclass
class _Block:
    changes: list[Change] = field(default_factory=list)
    words: str = ""
    removed: dict[str, Value] = field(default_factory=dict)  # of a diff


def advised_in(
    text: str,
    buffers: Iterable[Buffer] = (),
    known: Mapping[str, Value] | None = None,
    *,
    is_own: bool = False,
) -> Advised:
    """`known`: the run's own values, which come before what the text says they were. `is_own`: lines that do
    not say what they change are the run's, as beside a traceback or in a log."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], *lines[-_MOST_LINES // 2 :]]
    blocks, before = _blocks(lines)
    if is_own and not any(_is_explicit(block) for block in blocks):
        own = {change.name: change.value for block in blocks for change in block.changes}
        return Advised(own | dict(known or {}))
    was = _as_it_was(blocks, before, buffers, dict(known or {}))
    stages = _stages(blocks, was)
    first: dict[str, Change] = {}
    for block in blocks:
        for change in block.changes:
            if change.name not in first and change.value != was.get(change.name):
                first[change.name] = change
    return Advised(was, tuple(stages), tuple(first.values()))


def _is_explicit(block: _Block) -> bool:
    return bool(block.removed) or any(change.was is not None or change.told for change in block.changes)


def named(name: str) -> str:
    low = name.lower().replace("-", "_").replace(" ", "_")
    if low.startswith(("batch_gr", "tama", "batchgr")):
        return "batch_size"
    return _NAMES.get(low, low)


def value_of(name: str, text: str) -> Value | None:
    """None for what this knob cannot be: "de memoria" names no batch size."""
    text = text.strip("\"'` ").rstrip(".,;")
    if name in WORDS:
        low = text.lower().replace("torch.", "")
        found = _TYPES.get(low, low)
        return found if found in _DTYPES else None
    if name in SWITCHES:
        return {"true": True, "false": False, "on": True, "off": False}.get(text.lower())
    value = setting(text, {})
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if name in SHARES else int(value) if value == int(value) and 0 < value < 1e9 else None


def _blocks(lines: list[str]) -> tuple[list[_Block], dict[str, Value]]:
    """Config lines that belong together; and what stands in sentences before the first of them."""
    blocks: list[_Block] = []
    before: dict[str, Value] = {}
    open_, words, in_code = False, "", False
    for line in lines:
        plain = line.strip()
        if plain.startswith(("```", "~~~")):
            in_code, open_ = not in_code, False
            continue
        if not plain:
            open_ = open_ and in_code
            continue
        found, removed = _changes(line)
        if found or removed:
            if not open_:
                blocks.append(_Block(words=words))
                open_ = True
            blocks[-1].changes += found
            if any(change.told for change in found):  # beside what is to change may stand what it is
                told = {change.name: change.value for change in found}
                for change in _in_sentence(plain):
                    if told.get(change.name) != change.value:
                        before.setdefault(change.name, change.value)
            blocks[-1].removed |= removed
            continue
        if plain.startswith("#") and in_code:
            continue  # a comment between config lines, or a line that was commented out
        open_ = open_ and in_code
        words = plain[:200]
        for change in _in_sentence(plain):
            if change.was is not None:
                blocks.append(_Block([change], words))
            elif not blocks:
                before.setdefault(change.name, change.value)
        if not blocks:
            before |= {"dtype": d} if "dtype" not in before and (d := _dtype_named(plain)) else {}
    return blocks, before


def _changes(line: str) -> tuple[list[Change], dict[str, Value]]:
    """(what this line sets, what a diff's line takes away)."""
    if len(line) > 2000:
        return [], {}
    if row := _ROW.match(line.strip()):
        name = named(row["name"])
        was, value = value_of(name, row["was"]), value_of(name, row["value"])
        if was is None or value is None:
            return [], {}
        return [Change(name, value, was, line.strip())], {}
    if "--" in line and ("python" in line or "train" in line or "onecard" in line):
        flags = []
        told = _SAYS.search(line.partition("python")[0]) is not None
        for flag in _FLAG.finditer(line):
            name = named(flag["name"])
            if (value := value_of(name, flag["value"])) is not None:
                flags.append(Change(name, value, None, flag[0], told=told))
        return flags, {}
    found = _LINE.match(line.strip())
    if found is None:
        return _told(line), {}
    name = named(found["name"])
    if (value := value_of(name, found["value"])) is None:
        return [], {}
    was = None
    for said in _WAS.finditer(found["rest"]):
        if (was := value_of(name, said["value"])) is not None:
            break
    if line.startswith("-") and not line.startswith("- ") and was is None:
        return [], {name: value}
    return [Change(name, value, was, line.strip())], {}


def _told(line: str) -> list[Change]:
    """`reduce batch_size to 8`, `set compile=False`."""
    found = []
    for match in _DO.finditer(line[:1000]):
        name = named(match["name"])
        if not _ARROW.search(line) and (value := value_of(name, match["value"])) is not None:
            found.append(Change(name, value, None, match[0], told=True))
    return found


def _in_sentence(line: str) -> list[Change]:
    found = []
    for match in _ARROW.finditer(line[:1000]):
        name = named(match["name"])
        was, value = value_of(name, match["was"]), value_of(name, match["value"])
        if was is not None and value is not None:
            found.append(Change(name, value, was, match[0]))
    for match in _INLINE.finditer(line[:1000]):
        name = named(match["name"])
        if (value := value_of(name, match["value"])) is not None:
            found.append(Change(name, value, None, match[0]))
    return found


def _dtype_named(line: str) -> str | None:
    found = re.search(r"\b(bfloat16|bf16|float16|fp16)\b", line, re.IGNORECASE)
    return _TYPES.get(found[1].lower(), found[1].lower()) if found else None


# What train.py has where nobody says otherwise.
_USUAL: dict[str, Value] = {
    "compile": True, "dtype": "bfloat16", "batch_size": 12, "gradient_accumulation_steps": 40,
    "block_size": 1024,
}  # fmt: skip


def _as_it_was(
    blocks: list[_Block], before: dict[str, Value], buffers: Iterable[Buffer], known: dict[str, Value]
) -> dict[str, Value]:
    """The person's own values, then what the text says they were, then what is nowhere changed."""
    said: dict[str, Value] = {}
    own = blocks[0] if len(blocks) > 1 and _MINE.search(blocks[0].words) else None
    if own is not None and not any(change.was is not None for change in own.changes):
        said |= {change.name: change.value for change in own.changes}
    for block in blocks:
        said |= {name: value for name, value in block.removed.items() if name not in said}
        for change in block.changes:
            if change.was is not None:
                said.setdefault(change.name, change.was)
    for buffer in buffers:
        if len(buffer.shape) == 3 and buffer.shape[-1] > 5000:
            for name, size in zip(("batch_size", "block_size", "vocab_size"), buffer.shape, strict=True):
                said.setdefault(name, size)
            said.setdefault("compile", True)
            break
    for name, value in before.items():
        if name not in said and (blocks or name in SWITCHES | WORDS):
            said[name] = value
    for block in blocks:
        for change in block.changes:
            usual = dict(_USUAL if change.told else list(_USUAL.items())[:2])
            said.setdefault(change.name, usual.get(change.name, change.value))
    return said | known


def _stages(blocks: list[_Block], was: Mapping[str, Value]) -> list[Stage]:
    """A block that takes a change back, or makes another of it, begins a stage; one that adds goes on."""
    stages: list[Stage] = []
    now = dict(was)
    for block in blocks:
        after = now | {change.name: change.value for change in block.changes}
        changed = {name: value for name, value in after.items() if value != was.get(name)}
        if after == now or any(stage.values == changed for stage in stages):
            continue
        others = {name for name in after if after[name] != now.get(name)}
        fresh = all(now.get(name) == was.get(name) for name in others)
        if stages and fresh:
            stages[-1].values = changed
        else:
            stages.append(Stage(changed, block.words))
        now = after
    return stages
