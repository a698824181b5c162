"""The verbs with ordinary arguments, parsed by cyclopts. train and sample take configs: see cli.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, Token

from onecard import __version__
from onecard.config_file import parse_argument_text, shortened
from onecard.errors import UserError, need_package
from onecard.language import _
from onecard.terminal import forget_unusable_sizes, say, show, show_json

app = App(
    name="onecard",
    help="Pretrain language models on the one graphics card you own.",
    version=__version__,
    version_flags=["--version"],
    result_action="return_value",
)
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]


def _read_whole_number(_type: Any, tokens: Sequence[Token]) -> int:
    """As configs read it (1e3, 4*8); cyclopts alone would round 12.7 to another run's 13."""
    token = tokens[0]
    try:
        return int(token.value)
    except ValueError:
        value = parse_argument_text(token.value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        raise UserError(
            _("{name} is {value}").format(name=token.keyword, value=shortened(token.value)),
            _("it has to be a whole number"),
        )
    return int(value)


WholeNumber = Annotated[int | None, Parameter(converter=_read_whole_number)]


@app.command
def prepare(
    *inputs: str,
    name: str | None = None,
    out_root: str = "data",
    tokens: str | None = None,
    tokenizer: Literal["gpt2", "byte", "char"] | None = None,
    train_tokenizer: int | None = None,
    text_column: str | None = None,
    val_fraction: float | None = None,
    dump: str | None = None,
    edu: Flag = False,
    keep: Flag = False,
    check: Flag = False,
    force: Flag = False,
    as_json: Json = False,
) -> int:
    """Turn text into training tokens under data/NAME.

    Killed or interrupted, the same command continues. Run again with more --tokens or more files, it
    appends to what is there.

    Parameters
    ----------
    inputs
        Files or folders of text, jsonl or parquet, plain or .gz or .zst; or a name: fineweb, openwebtext,
        tinystories, climbmix, shakespeare, shakespeare_char, or stdlib, this Python's own sources.
    name
        Name of the folder under data/. Default: from the first input.
    out_root
        The folder that holds all data sets; nanoGPT's configs look in data/.
    tokens
        Stop when there are this many training tokens, e.g. 3.2B or 100M. Default: all there are.
    tokenizer
        gpt2 (default), byte (default for stdlib), or char (default for shakespeare_char).
    train_tokenizer
        Learn a BPE of this many tokens from the text itself, e.g. 32768, and keep it beside the data.
    text_column
        Column of jsonl and parquet that holds the text. Default: text.
    val_fraction
        Share of documents held out for validation, chosen by their hash.
    dump
        fineweb only: one crawl, e.g. CC-MAIN-2013-20. Default: a sample of all crawls.
    edu
        fineweb only: FineWeb-Edu, the part that teaches.
    keep
        Keep the parquet files that are downloaded (in the Hub cache). Default: remove each once used.
    check
        Prepare nothing: verify data/NAME against its meta.json and show what is in it.
    force
        Replace a data/NAME that was made from something else.
    as_json
        Print the facts as JSON.
    """
    need_package("numpy", "train", "preparing data")
    from onecard.data.prepare.command import prepare as run_prepare
    from onecard.data.prepare.outcome import summary
    from onecard.data.prepare.request import checked_root, dataset_name, named_dataset, parse_count

    if check:
        from onecard.data.check.report import check as run_check

        given = Path(inputs[0]) if inputs else Path()
        is_dataset = name is None and (given / "train.bin").exists()
        named = named_dataset(list(inputs), dump, edu)
        root = checked_root(out_root)
        report = run_check(given if is_dataset else root / dataset_name(list(inputs), name, named))
        if as_json:
            show_json(json.dumps(report.to_json(), indent=1))
        else:
            show(report.text())
        return 0 if report.ok else 1
    facts = run_prepare(
        list(inputs),
        name=name,
        out_root=out_root,
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        text_column=text_column,
        val_fraction=val_fraction,
        tokens=None if tokens is None else parse_count(tokens),
        dump=dump,
        edu=edu,
        keep=keep,
        force=force,
    )
    if as_json:
        show_json(json.dumps(facts.to_json(), indent=1))
    else:
        show(summary(facts))
    return 0


@app.command
def gpus(card: str | None = None, /, *, as_json: Json = False) -> int:
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
def bench(
    config: str | None = None,
    /,
    *,
    seconds: float = 20.0,
    device: str = "auto",
    power_limits: str | None = None,
    as_json: Json = False,
) -> int:
    """Measure this machine's card as training uses it, and keep the figures for later.

    Parameters
    ----------
    config
        A run's config, whose width and vocabulary are measured besides the usual ones.
    seconds
        How long to measure, about.
    device
        auto, cuda, cuda:N; or cpu, which measures the processor in small sizes.
    power_limits
        Compare power limits instead, in watts: 200,170,140. You set each one, with the command it names; it
        measures TFLOPS and watts. It changes no setting itself.
    as_json
        Print JSON.
    """
    need_package("torch", "train", "measuring a card")
    from onecard.hardware.bench_show import bench_command

    return bench_command(config, seconds=seconds, device=device, as_json=as_json, power_limits=power_limits)


@app.command
def eta(
    log: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    gpu: str | None = None,
    max_iters: WholeNumber = None,
    tokens: str | None = None,
    batch_size: WholeNumber = None,
    block_size: WholeNumber = None,
    gradient_accumulation_steps: WholeNumber = None,
    config: str | None = None,
    as_json: Json = False,
) -> int:
    """When a run will be done, from the first lines of its log; its true speed and MFU.

    The step is the median of the lines without warm-up and evaluations; evaluations to come are added again.
    The range is two standard errors of that median (from the median absolute deviation), at least 2%
    (5% below 20 lines, 10% below 5), and holds the latest pace and the mean.

    Parameters
    ----------
    log
        A log of nanoGPT, nanochat, onecard or the Hugging Face Trainer, a run's folder, or - to paste one.
    gpu
        The card, e.g. "RTX 4070". Default: the one the log names, or this machine's.
    max_iters
        How long the run is, where the log does not say.
    tokens
        The same in tokens, e.g. 3.2B.
    batch_size
        Sequences per micro-batch, where the log does not tell the tokens of an iteration.
    block_size
        Tokens per sequence.
    gradient_accumulation_steps
        Micro-batches per iteration.
    config
        The run's config file: tells all of these, and the model's shape.
    as_json
        Print JSON.
    """
    from onecard.report.eta_command import eta_command
    from onecard.report.known import Known

    known = Known(
        max_iters=max_iters,
        batch_size=batch_size,
        block_size=block_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    return eta_command(log, known, tokens=tokens, config_file=config, gpu=gpu, as_json=as_json)


@app.command
def export(
    out_dir: str,
    folder: str,
    /,
    *,
    step: int | None = None,
    to: Literal["huggingface", "nanogpt"] | None = None,
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
        A Hugging Face folder (GPT-2 or nanochat, as the run is), or a ckpt.pt that nanoGPT loads. Default:
        by the name, nanogpt where it ends in .pt.
    """
    need_package("torch", "train", "exporting")
    from onecard.run.export import export_run

    to = to or ("nanogpt" if folder.endswith(".pt") else "huggingface")

    show(export_run(out_dir, folder, step=step, to=to, note=lambda text: say(f"note: {text}")))
    return 0


def run_verb(arguments: list[str], config_verbs: Iterable[str]) -> int:
    """Run one of the verbs above. `config_verbs` are cli.py's own, named here for "did you mean"."""
    forget_unusable_sizes()  # tables are rich's
    for verb in config_verbs:
        if verb not in app:
            app.command(lambda: 0, name=verb)
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        verb = f" {arguments[0]}" if arguments and arguments[0] in app else ""
        raise UserError(str(error).strip(), hint=f"onecard{verb} --help") from None
    return result if isinstance(result, int) else 0
