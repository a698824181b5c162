"""`onecard config`: the card, its PC's memory and the price of a kWh, remembered for plan and eta. Flags win.

They lie in one TOML file of the user's. A file that cannot be read costs a note, never the command.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from onecard.config.knobs import load_config
from onecard.errors import UserError
from onecard.files import read_bounded, write_text
from onecard.hardware.cards import find_card
from onecard.hardware.machine import local_gpus
from onecard.language import _, english
from onecard.plan.options import Options
from onecard.terminal import say, show

NAMES = ("gpu", "host_ram", "price", "currency")
_MOST_BYTES = 64 * 1024  # of a file of four lines
_EXAMPLE = "onecard config gpu='RTX 4070' host_ram=32 price=0.25 currency=EUR"


def config_command(words: Sequence[str]) -> int:
    """Shows what is remembered, after `NAME=VALUE` has set and `NAME=` has removed some of it."""
    values, problem = _read()
    if problem:
        _note(problem)
    asked = [word for word in words if _name_of(word) in NAMES and "=" not in word]
    words = [word for word in words if word not in asked]
    for word in words:
        name, value = _assignment(word)
        values = {key: old for key, old in values.items() if key != name}
        values |= _checked({name: value}) if value else {}
    if words:
        path = config_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{name} = {json.dumps(values[name], ensure_ascii=False)}\n" for name in NAMES if name in values
        ]
        write_text(path, "".join(lines))
    shown = [name for name in map(_name_of, asked) if name in values] if asked else list(values)
    if shown:
        show("\n".join(_shown(values, shown)))
    elif asked:
        show(_("{name} is not remembered").format(name=", ".join(map(_name_of, asked))))
    else:
        show(_("nothing is remembered; for example: {example}").format(example=_EXAMPLE))
    return 0


def config_path() -> Path:
    """ONECARD_CONFIG, else the folder that the system has for it."""
    if said := os.environ.get("ONECARD_CONFIG"):
        return Path(said)
    home = Path.home()
    base = {"win32": home / "AppData" / "Roaming", "darwin": home / "Library" / "Application Support"}.get(
        sys.platform, home / ".config"
    )
    given = os.environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    # The specification of XDG has relative paths ignored.
    return (Path(given) if given and Path(given).is_absolute() else base) / "onecard" / "config.toml"


def with_remembered(options: Any, names: Sequence[str] = NAMES) -> Any:
    """A verb's options, with what is remembered where the command line says nothing; a note says so."""
    with english(options.json):
        values, problem = _read()
        if problem:
            _note(problem)
        used = {name: value for name, value in values.items() if name in names and not options.is_set(name)}
        if "gpu" in used and _is_here(used["gpu"]):
            del used["gpu"]  # of this machine's card more is known than its name
        if options.gpu is None and "gpu" not in used:
            used.pop("host_ram", None)  # and of this machine's memory
        if used:
            shown = ", ".join(_shown(used, used))
            _note(_("remembered by onecard config: {values}").format(values=shown))
    return dataclasses.replace(options, **used)


def remembered_card() -> str | None:
    values, problem = _read()
    if problem:
        _note(problem)
    return values.get("gpu")


def _is_here(card: str) -> bool:
    return any(gpu.card == find_card(card) for gpu in local_gpus())


def _assignment(word: str) -> tuple[str, str]:
    name, (_before, sign, value) = _name_of(word), word.partition("=")
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = _("did you mean {name}?").format(name=near[0]) if near else _EXAMPLE
        raise UserError(
            _("onecard config does not remember '{name}'").format(name=name[:60]),
            _("it remembers {names}").format(names=", ".join(NAMES)),
            hint,
        )
    if not sign:
        raise UserError(_("'{word}' is not NAME=VALUE").format(word=word[:60]), hint=_EXAMPLE)
    return name, value.strip()


def _name_of(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("-").replace("-", "_")


def _shown(values: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """As one would type them: 32 and not 32.0."""
    chosen = {name: values[name] for name in NAMES if name in names}
    return [f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}" for n, v in chosen.items()]


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as plan's own options take them."""
    for name, value in values.items():
        if not str(value).isprintable():
            raise UserError(_("{name} has characters that cannot be printed").format(name=name))
    options = load_config(Options, [f"--{name}={value}" for name, value in values.items()])
    if options.gpu is not None:
        options = dataclasses.replace(options, gpu=find_card(options.gpu).name)
    return {name: getattr(options, name) for name in values}


def _read() -> tuple[dict[str, Any], str]:
    """What is remembered, and what is wrong with the file."""
    path = config_path()
    try:
        found = tomllib.loads(read_bounded(path, _MOST_BYTES).decode("utf-8"))
        return _checked({name: found[name] for name in NAMES if name in found}), ""
    except FileNotFoundError:
        return {}, ""
    except UserError as error:
        why = error.what
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    return {}, _("{path} is ignored: {why}").format(path=path, why=why)


def _note(text: str) -> None:
    say(_("note: {text}").format(text=text))
