"""What a user asks `onecard prepare` for, checked before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onecard.data.hub import catalogue
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.sources import STDLIB
from onecard.data.tokenizer import NAMES
from onecard.errors import UserError
from onecard.language import _

_LONGEST_NAME = 200  # bytes; a file system takes 255, and names of ours are made of it


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    folder: Path
    inputs: list[str]
    named: catalogue.NamedDataset | None
    tokenizer: str  # a name of tokenizer.NAMES, or "bpe" to be trained
    train_tokenizer: int | None
    text_column: str
    val_fraction: float | None
    tokens: int | None
    keep: bool
    force: bool
    show: bool


def request_of(inputs: list[str], options: PrepareOptions, show: bool) -> Request:
    """The request, or what is wrong with it; nothing is read or made."""
    refuse_odd_inputs(inputs)
    named = named_dataset(inputs, options.dump, options.edu)
    learnt = options.train_tokenizer is not None
    if learnt and options.tokenizer not in (None, "bpe"):
        raise UserError(_("--train-tokenizer and --tokenizer exclude each other"))
    default = named.tokenizer if named else "byte" if inputs == [STDLIB] else "gpt2"
    tokenizer = "bpe" if learnt else options.tokenizer or default
    folder = checked_root(options.out_root) / dataset_name(inputs, options.name, named)
    if tokenizer not in NAMES and not learnt:
        what = _("there is no tokenizer {name!r}").format(name=tokenizer)
        raise UserError(what, hint=_("one of: {names}").format(names=", ".join(NAMES)))
    if tokenizer == "char" and named is not None and named.repo:
        raise UserError(
            _("--tokenizer=char is not for {name}").format(name=named.name),
            _("it would have to read all of it first, to know its characters"),
            _("--tokenizer=byte, or --train-tokenizer 32768"),
        )
    if options.val_fraction is not None and not 0 < options.val_fraction <= 0.5:
        what = _("val_fraction must be above 0 and at most 0.5, not {given}")
        raise UserError(what.format(given=options.val_fraction))
    if options.tokens is not None and options.tokens < 1:
        raise UserError(_("--tokens must be at least 1, not {given}").format(given=options.tokens))
    return Request(
        folder=folder, inputs=inputs, named=named, tokenizer=tokenizer,
        train_tokenizer=options.train_tokenizer,
        text_column=options.text_column or (named.text_column if named else "text"),
        val_fraction=options.val_fraction, tokens=options.tokens, keep=options.keep, force=options.force,
        show=show,
    )  # fmt: skip


def named_dataset(inputs: list[str], dump: str | None, edu: bool) -> catalogue.NamedDataset | None:
    """A dataset known by name; a file or folder of that name that is there goes first."""
    if len(inputs) == 1 and inputs[0] in catalogue.NAMES and not Path(inputs[0]).exists():
        return catalogue.lookup(inputs[0], dump=dump, edu=edu)
    if dump is not None or edu:
        flag = "--dump" if dump is not None else "--edu"
        what = _("{flag} belongs to fineweb").format(flag=flag)
        raise UserError(what, hint=f"onecard prepare fineweb {flag} …")
    return None


def dataset_name(inputs: list[str], name: str | None, named: catalogue.NamedDataset | None = None) -> str:
    """The folder under data/."""
    if not inputs:
        hint = _("onecard prepare FILES-OR-FOLDERS, or one of: {names}")
        raise UserError(
            _("nothing to prepare"), hint=hint.format(names=", ".join([STDLIB, *catalogue.NAMES]))
        )
    if name is None:
        if len(inputs) > 1:
            hint = f"onecard prepare {' '.join(inputs)} --name NAME"
            raise UserError(_("several inputs need a name"), hint=hint)
        if named is not None:
            name = f"{named.name}-edu" if named.edu else named.name
        else:
            name = _name_of(inputs[0])
    if why := _why_no_name(name):
        raise UserError(
            _("{name!r} cannot be the name of a dataset").format(name=name),
            _("it becomes a folder under data/, and {why}").format(why=why),
            _("give another one, of letters, digits, - and _: --name NAME"),
        )
    return name


def _why_no_name(name: str) -> str:
    if not name.strip():
        return _("it is empty")
    if name.startswith("."):
        return _("it begins with a dot, as hidden folders do")
    if bad := next((sign for sign in name if sign in '/\\:*?"<>|' or not sign.isprintable()), ""):
        return _("it holds {sign!r}").format(sign=bad)
    if name != name.strip() or name.endswith("."):
        return _("it begins or ends with a space, or ends with a dot")
    return _("it is too long") if len(name.encode()) > _LONGEST_NAME else ""


def refuse_odd_inputs(inputs: list[str]) -> None:
    """Paths that mean nothing, or the current folder by accident, as "" does."""
    for given in inputs:
        if not given.strip() or "\0" in given:
            raise UserError(
                _("{given!r} is no name of a file or folder").format(given=given),
                "" if given.strip() else _("a shell gives an empty name where a variable is not set"),
                _("for the current folder: onecard prepare . --name NAME"),
            )


def checked_root(out_root: str | Path) -> Path:
    """The folder that holds all datasets, which may have yet to be made."""
    hint = _("name the folder that shall hold all datasets, such as --out-root data")
    if not str(out_root).strip() or not str(out_root).isprintable():
        raise UserError(_("{given!r} is no name of a folder").format(given=str(out_root)), hint=hint)
    root = Path(out_root)
    there = next((path for path in (root, *root.parents) if path.exists()), root)
    if there.exists() and not there.is_dir():
        what = _("--out-root {path} cannot be a folder").format(path=root)
        raise UserError(what, _("{path} is a file").format(path=there), hint)
    return root


def _name_of(given: str) -> str:
    path = Path(given)
    if given != STDLIB and path.is_dir():
        return path.resolve().name
    for ending in (".gz", ".zst"):
        path = path.with_suffix("") if path.suffix.lower() == ending else path
    return path.stem
