"""What is known of a dataset without reading its tokens: where it lies, its vocabulary, how long it is.

Who trains on one that is missing is refused in data/bins.py.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from onecard.arch.shapes import GPT2_VOCABULARY
from onecard.errors import UserError, first_line
from onecard.files import DATA_JSON_BYTES, load_json, open_plain
from onecard.language import _

DATA = Path("data")  # where nanoGPT's configs look, and prepare writes
# Datasets that prepare writes in bytes or characters, whoever trains on them: the tokenizer and its size.
OWN_TOKENS = {"stdlib": ("byte", 257), "shakespeare_char": ("char", 65)}
# nanoGPT's meta.pkl maps a few hundred characters; anything of this size is something else.
_META_PKL_LIMIT = 16 * 2**20


@dataclass(frozen=True)
class DataFacts:
    """Of the dataset that a config names; all of it may be missing."""

    folder: Path
    is_there: bool
    vocabulary: int | None = (
        None  # rows of an embedding for its tokens; None where nothing says which they are
    )
    train_tokens: int | None = None
    problem: str = ""  # why what it says of itself cannot be used


def data_dir(dataset: str) -> Path:
    """The folder of a dataset: a name below data/, or a path where it plainly is one (/…, ./…, ../…, ~/…)."""
    if dataset.startswith(("/", "./", "../", "~/")) or Path(dataset).is_absolute():
        return Path(dataset).expanduser()
    parts = PurePath(dataset).parts
    if not parts or ".." in parts or "\0" in dataset:
        raise UserError(
            _("dataset cannot be {value}").format(value=repr(dataset)),
            _("dataset is the name of a folder below data/"),
            _("a folder elsewhere is given as a path: --dataset=./FOLDER or --dataset=/FOLDER"),
        )
    return DATA / dataset


def embedding_rows(tokenizer: str, tokens: int) -> int:
    """How many tokens a model of this data knows."""
    if tokenizer == "char":
        return tokens  # as nanoGPT sizes it, so that its checkpoints fit
    return -(-tokens // 64) * 64  # a multiple of 64 suits the matmuls; 50257 becomes 50304


def tokens_of(tokenizer: Any) -> int:
    """How many a tokenizer has, by its description in meta.json; ValueError where that contradicts itself.
    The tokenizer is not built: whoever only plans has no need of it."""
    count = tokenizer.get("n_vocab") if isinstance(tokenizer, dict) else None
    if type(count) is not int:
        raise ValueError(_("it names no tokenizer"))
    parts = [tokenizer.get(name) for name in ("characters", "merges", "specials")]
    characters, merges, specials = (len(part) if isinstance(part, str | list) else 0 for part in parts)
    sizes = {"byte": 257, "gpt2": GPT2_VOCABULARY, "char": characters, "bpe": 256 + merges // 8 + specials}
    if not isinstance(name := tokenizer.get("name"), str) or count != sizes.get(name) or count < 1:
        raise ValueError(_("its tokenizer is not as it was written"))
    return count


def data_facts(dataset: str) -> DataFacts:
    """Whatever is wrong with it is a problem, not an error: who trains on it reads it again, and refuses."""
    folder = data_dir(dataset)
    try:
        is_there = any(folder.glob("*.bin"))
    except OSError:
        is_there = False
    vocabulary, problem, meta = None, "", {}
    try:
        meta = _meta_json(folder)
        vocabulary = _by_meta_json(meta)
    except FileNotFoundError:
        if (folder / "meta.pkl").is_file():
            vocabulary, problem = _by_meta_pkl(folder / "meta.pkl")
    except (OSError, ValueError) as error:
        problem = _("{path} cannot be used ({why}): the size of the vocabulary is assumed").format(
            path=folder / "meta.json", why=getattr(error, "strerror", None) or first_line(error)
        )
    return DataFacts(folder, is_there, vocabulary, _train_tokens(folder, meta.get("dtype")), problem)


def _meta_json(folder: Path) -> dict[str, Any]:
    meta = load_json(folder / "meta.json", DATA_JSON_BYTES)
    if not isinstance(meta, dict):
        raise ValueError(_("it is no JSON object"))
    return meta


def _by_meta_json(meta: dict[str, Any]) -> int:
    count = tokens_of(meta.get("tokenizer"))
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise ValueError(_("it does not say how its tokens are written"))
    return embedding_rows(meta["tokenizer"]["name"], count)


def _by_meta_pkl(path: Path) -> tuple[int | None, str]:
    try:
        return len(character_table(path)), ""
    except (OSError, UserError) as error:
        why = error.why or error.what if isinstance(error, UserError) else first_line(error)
        problem = _("{path} cannot be used ({why}): the size of the vocabulary is assumed")
        return None, problem.format(path=path, why=why)


def _train_tokens(folder: Path, dtype: Any) -> int | None:
    """By the size of the files, as the trainer reads them; None where there are none."""
    try:
        if (whole := folder / "train.bin").exists():
            return whole.stat().st_size // (4 if dtype == "uint32" else 2) or None
        # Shards as llm.c writes them: 16 bits a token, behind 256 numbers of 32.
        shards = [file.stat().st_size for file in folder.glob("*_train_*.bin")]
        return sum(max(0, size - 1024) // 2 for size in shards) or None
    except OSError:
        return None


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, strings and containers only. Nothing can be looked up, so nothing can be run."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(
            _("it asks for {module}.{name}, which plain data never does").format(
                module=module_name, name=global_name
            )
        )


def character_table(path: Path) -> str:
    """The characters of nanoGPT's meta.pkl, {'stoi': {char: id}, 'itos': {id: char}}, by their ids."""
    if path.stat().st_size > _META_PKL_LIMIT:
        raise UserError(
            _("{path} is too large for a character table ({n:,} bytes)").format(
                path=path, n=path.stat().st_size
            )
        )
    try:
        with open_plain(path) as file:
            meta = _PlainUnpickler(file).load()
    # Damaged pickles raise nearly anything, from KeyError to MemoryError.
    except Exception as error:
        raise UserError(
            _("{path} was not read").format(path=path),
            _("it is damaged or unsafe: {error}").format(error=error),
            _("delete it if you do not know where it comes from, and prepare the data again"),
        ) from error
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or not all(type(key) is int for key in itos):
        raise UserError(
            _("{path} has no character table").format(path=path),
            _("expected 'stoi' and 'itos', as nanoGPT writes"),
        )
    characters = [itos.get(number) for number in range(len(itos))]
    if not all(isinstance(c, str) and len(c) == 1 for c in characters) or len(set(characters)) < len(itos):
        raise UserError(
            _("{path} is not a table of characters").format(path=path),
            _("ids must be 0, 1, 2 …, one character each"),
        )
    return "".join(str(character) for character in characters)
