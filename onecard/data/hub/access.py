"""How the Hub is reached, and what a person reads when it cannot be."""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path
from urllib.parse import urlsplit

from onecard.data.hub.catalogue import NamedDataset
from onecard.errors import UserError
from onecard.language import _

_TRUE = {"1", "ON", "YES", "TRUE"}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def refuse_offline(name: str, path: str = "") -> None:
    """Offline mode is an error before anything is sent."""
    if any(os.environ.get(flag, "").upper() in _TRUE for flag in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise UserError(
            _("{what} is not on this machine, and the network is switched off").format(what=path or name),
            _("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"),
            f"unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE\n{local_hint(name)}",
        )


class TryAgainError(UserError):
    """What a second attempt may mend: the network, a busy server, a damaged file."""


def explained(error: Exception, name: str, repo: str, asked: str) -> UserError:
    """What huggingface_hub raised over `asked`, a file or a folder of a dataset, as a person reads it."""
    # Behind "not found in the cache" is why it could not be asked for.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    answer = getattr(error, "response", None)
    if answer is not None:
        # The content's own host refuses a signed address that has expired: the next attempt gets another.
        elsewhere = urlsplit(str(answer.url)).netloc != urlsplit(endpoint()).netloc
        return _refused(int(answer.status_code), name, repo, asked, elsewhere)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return no_room(asked, str(error.strerror))
    if isinstance(error, OSError) and error.filename is not None:
        what = _("cannot write to {path}").format(path=Path(str(error.filename)).parent)
        return UserError(what, str(error.strerror or error), exit_code=1)
    if isinstance(error, OSError) and error.errno is None and "Consistency check" in str(error):
        return damaged(f"{repo}/{asked}", str(error).partition("\n")[0])
    if isinstance(error, AttributeError | KeyError | TypeError | ValueError):
        why = _("the answer is not the Hub's; is it a log-in page of this network, or is HF_ENDPOINT wrong?")
        return unreachable(name, why)
    return unreachable(name, str(error).partition("\n")[0] or type(error).__name__)


def unreachable(name: str, reason: str, host: str = "") -> UserError:
    """No network at all, or one that breaks all the time."""
    return TryAgainError(
        _("cannot reach {host}").format(host=host or urlsplit(endpoint()).netloc or endpoint()),
        reason,
        _("with a network, run the same command again") + f"\n{local_hint(name)}",
        exit_code=1,
    )


def _refused(status: int, name: str, repo: str, asked: str, elsewhere: bool) -> UserError:
    page = f"{endpoint()}/datasets/{repo}"
    if status in (401, 403) and not elsewhere:
        return UserError(
            _("the Hub does not give access to {repo}").format(repo=repo),
            _("HTTP {status}: it asks for consent or a log-in, or is no longer there; see {page}").format(
                status=status, page=page
            ),
            f"hf auth login\n{local_hint(name)}",
            exit_code=1,
        )
    if status in (404, 410):
        return UserError(
            _("there is no {path} in {repo}").format(path=asked, repo=repo),
            _("HTTP {status}: it was moved, or removed; see {page}").format(status=status, page=page),
            local_hint(name),
            exit_code=1,
        )
    kind = TryAgainError if elsewhere or status >= 500 or status in (408, 429) else UserError
    what = _("the Hub refuses {path} of {repo}").format(path=asked, repo=repo)
    return kind(what, f"HTTP {status}", local_hint(name), exit_code=1)


def damaged(what: str, why: str) -> UserError:
    return TryAgainError(
        _("{file} arrives damaged").format(file=what),
        why + "\n" + _("nothing of it is kept"),
        _("a proxy or a disk on the way may alter it: try another network or folder"),
        exit_code=1,
    )


def wrong_hash(what: str, expected: str, found: str) -> UserError:
    return damaged(what, _("SHA-256: expected {wanted}, found {found}").format(wanted=expected, found=found))


def no_room(path: str, why: str) -> UserError:
    return UserError(
        _("no room for {path}").format(path=path),
        why,
        _("make room, then run the same command again"),
        exit_code=1,
    )


def unknown_dump(dataset: NamedDataset, there: list[str]) -> UserError:
    crawls = sorted((name for name in there if name.startswith("CC-MAIN-")), reverse=True)
    dump = dataset.dump or ""
    near = difflib.get_close_matches(dump, crawls, n=4, cutoff=0.8) or crawls[:4]
    edu = " --edu" if dataset.edu else ""
    return UserError(
        _("{repo} has no crawl {dump}").format(repo=dataset.repo, dump=dump),
        _("near it are {names}; there are {n}").format(names=", ".join(near), n=len(crawls))
        if near
        else _("the Hub lists no crawls"),
        f"onecard prepare {dataset.name} --dump {near[0]}{edu}" if near else "",
    )


def local_hint(name: str) -> str:
    """The hint at what needs no network."""
    how = " --tokenizer char" if name == "shakespeare_char" else ""
    return _("from files you have:") + f" onecard prepare FILES-OR-FOLDER --name {name}{how}"
