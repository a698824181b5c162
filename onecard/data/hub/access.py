"""How the Hub is reached: settings from the environment, and what to tell a person when it cannot be."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from urllib.parse import urlsplit

from onecard import __version__
from onecard.data.hub.catalogue import NamedDataset
from onecard.data.hub.transfer import DamagedError, Patience, RefusedError
from onecard.errors import UserError

_TRUE = {"1", "ON", "YES", "TRUE"}
USER_AGENT = {"User-Agent": f"onecard/{__version__}"}


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_cache() -> Path:
    """Where huggingface_hub keeps its downloads, by its own rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def is_offline() -> bool:
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def headers() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip() or _stored_token()
    return {**USER_AGENT, **({"Authorization": f"Bearer {token}"} if token else {})}


def _stored_token() -> str | None:
    """Of `hf auth login`. The datasets are public: whatever is wrong with it is no reason to stop."""
    if _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    try:
        from huggingface_hub import get_token

        return get_token()
    except Exception:  # missing, damaged or of another version
        return None


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in _TRUE


# ---------------------------------------------------------------- what to tell a person


def refuse_offline(name: str, path: str = "") -> None:
    """Before anything is sent."""
    if is_offline():
        raise UserError(
            f"{path or name} is not on this machine, and the network is switched off",
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
            f"unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE\n{local_hint(name)}",
        )


def unreachable(name: str, reason: str, host: str = "", kept: str = "") -> UserError:
    """No network at all, or one that breaks all the time. `kept`: what the next attempt need not fetch."""
    return UserError(
        f"cannot reach {host or urlsplit(endpoint()).netloc or endpoint()}",
        "\n".join(line for line in (reason, kept) if line),
        f"with a network, the same command again\n{local_hint(name)}",
        exit_code=1,
    )


def refused(name: str, repo: str, path: str, error: RefusedError) -> UserError:
    page = f"{endpoint()}/datasets/{repo}"
    if error.status in (401, 403):
        return UserError(
            f"the Hub does not give out {repo}",
            f"{error}: it asks for consent or a log-in, or is no longer there; see {page}",
            f"hf auth login\n{local_hint(name)}",
            exit_code=1,
        )
    if error.status in (404, 410):
        why = f"{error}: it was moved, or removed; see {page}"
        return UserError(f"there is no {path} in {repo}", why, local_hint(name), exit_code=1)
    return UserError(f"the Hub refuses {path} of {repo}", str(error), local_hint(name), exit_code=1)


def damaged(what: str, error: DamagedError, patience: Patience) -> UserError:
    return UserError(
        f"{what} arrives damaged",
        f"{error}\nit was fetched {patience.refetches + 1} times; nothing of it is kept",
        "a proxy or a disk on the way may alter it: try another network or folder",
        exit_code=1,
    )


def unknown_dump(dataset: NamedDataset, there: list[str]) -> UserError:
    crawls = sorted((name for name in there if name.startswith("CC-MAIN-")), reverse=True)
    dump = dataset.dump or ""
    near = difflib.get_close_matches(dump, crawls, n=4, cutoff=0.8) or crawls[:4]
    edu = " --edu" if dataset.edu else ""
    return UserError(
        f"{dataset.repo} has no crawl {dump}",
        f"near it are {', '.join(near)}; there are {len(crawls)}" if near else "the Hub lists no crawls",
        f"onecard prepare {dataset.name} --dump {near[0]}{edu}" if near else "",
    )


def local_hint(name: str) -> str:
    """The way that needs no network."""
    how = " --tokenizer char" if name == "shakespeare_char" else ""
    return f"from files you have: onecard prepare FILES-OR-FOLDER --name {name}{how}"
