"""The verbs with ordinary arguments, parsed by cyclopts. train and sample take configs: see cli.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from onecard import __version__
from onecard.errors import UserError, need_package

app = App(
    name="onecard",
    help="Pretrain language models on the one graphics card you own.",
    version=__version__,
    version_flags=["--version"],
    result_action="return_value",
)


@app.command
def prepare(
    *inputs: str,
    name: str | None = None,
    out_root: Path = Path("data"),
    tokenizer: Literal["gpt2", "byte", "char"] | None = None,
    text_column: str = "text",
    val_fraction: float | None = None,
    force: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Turn text into training tokens under data/NAME.

    Parameters
    ----------
    inputs
        Files or folders of text, jsonl or parquet; or `stdlib`, this Python's own sources.
    name
        Name of the folder under data/. Default: from the first input.
    out_root
        The folder that holds all data sets; nanoGPT's configs look in data/.
    tokenizer
        gpt2 (default), byte (default for stdlib), or char.
    text_column
        Column of jsonl and parquet that holds the text.
    val_fraction
        Share of documents held out for validation, chosen by their hash.
    force
        Replace a data/NAME that was made from something else.
    as_json
        Print the facts as JSON.
    """
    need_package("numpy", "train", "preparing data")
    from onecard.data.prepare import prepare as run_prepare
    from onecard.data.prepare import summary

    if not inputs:
        raise UserError(
            "nothing to prepare",
            hint="onecard prepare FILES..., or onecard prepare stdlib for the built-in corpus",
        )
    # The built-in corpus needs nothing but Python; its bytes are its tokens.
    tokenizer = tokenizer or ("byte" if inputs == ("stdlib",) else "gpt2")
    facts = run_prepare(
        list(inputs),
        name=name,
        out_root=out_root,
        tokenizer=tokenizer,
        text_column=text_column,
        val_fraction=val_fraction,
        force=force,
    )
    print(json.dumps(facts.to_json(), indent=1) if as_json else summary(facts))
    return 0


@app.command
def gpus(card: str | None = None, /, *, as_json: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """This machine's card and the figures of all known ones.

    Parameters
    ----------
    card
        Show one card only, e.g. "4070" or "rtx4070 laptop".
    as_json
        Print JSON.
    """
    from onecard.hardware.show import gpus_command

    return gpus_command(card, as_json)


@app.command
def export(
    out_dir: str,
    folder: str,
    /,
    *,
    step: int | None = None,
    to: Literal["huggingface", "nanogpt"] = "huggingface",
) -> int:
    """Write a run's model for other programs.

    Parameters
    ----------
    out_dir
        The run.
    folder
        Where to write: a new folder (huggingface) or a file such as ckpt.pt (nanogpt).
    step
        Which checkpoint. Default: the one `sample` would use.
    to
        A Hugging Face GPT-2 folder, or a ckpt.pt that nanoGPT loads.
    """
    need_package("torch", "train", "exporting")
    from onecard.run.export import export_run

    print(export_run(out_dir, folder, step=step, to=to))
    return 0


def run_verb(arguments: list[str], config_verbs: Iterable[str]) -> int:
    """Run one of the verbs above. `config_verbs` are cli.py's own, named here for "did you mean"."""
    for verb in config_verbs:
        if verb not in app:
            app.command(lambda: 0, name=verb)
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        verb = f" {arguments[0]}" if arguments and arguments[0] in app else ""
        raise UserError(str(error).strip(), hint=f"onecard{verb} --help") from None
    return result if isinstance(result, int) else 0
