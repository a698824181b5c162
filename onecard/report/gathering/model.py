"""The model of a run: its shape, its vocabulary and what they are known from.

What a log prints of itself (parameters, vocabulary, the first loss) counts before a config, which may be
another run's, and before a default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onecard.arch import dial
from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, LARGEST, PRETRAINED, GPT2Shape, Shape
from onecard.config.dataset import OWN_TOKENS, embedding_rows
from onecard.config.resolve import vocabulary_of
from onecard.errors import UserError
from onecard.language import _
from onecard.report.gathering.datasets import NO_DATA, data_here
from onecard.report.gathering.known import HUGGINGFACE, NANOCHAT_2025, NANOCHATS, NANOGPT
from onecard.report.gathering.sources import Sources, number, switch, whole, word
from onecard.report.log import Log

_NEAR = 0.02  # two counts of parameters that mean one model: nanoGPT prints 0.01M
_NEAR_IN_PROSE = 0.1  # "40M" may be 36 to 44
# A first loss is the logarithm of the vocabulary and a little more. Of GPT-2's tokens, of 45 to 120
# characters and of bytes; any other may be that of a model that has learnt before.
_GPT2_BEGINS, _CHARACTERS_BEGIN, _BYTES_BEGIN = (10.7, 11.1), (3.8, 4.8), (5.45, 5.85)
_FEW = range(2, 1024)  # characters or bytes
_USUAL_SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}  # nanoGPT's
# Vocabularies that models are trained with.
_USUAL = (32_000, 32_768, 49_152, 50_257, 50_304, 50_432, 65_536, 100_277, 128_256, 151_936)
_DEEPEST = 64


@dataclass(frozen=True)
class Model:
    shape: Shape | None
    parameters: int | None
    parameters_without_embeddings: int | None
    flops_per_token: float | None
    vocab_size: int | None
    tokenizer: str | None


def model_of(sources: Sources, dataset: str | None) -> Model:
    printed = _printed_count(sources)
    vocabulary = sources.first("vocab_size", *_said_vocabulary(sources, dataset))
    shape = _shape_of_config(sources, printed, vocabulary) or _shape_of_log(sources, printed, vocabulary)
    if shape is not None:
        vocabulary = shape.vocab_size
        sources.origin.setdefault("vocab_size", sources.origin["shape"])
    flops = sources.first(
        "flops_per_token", sources.in_log("flops_per_token", number),
        (sources.origin.get("shape", ""), float(shape.flops_per_token) if shape else None),
    )  # fmt: skip
    parameters, without = printed, whole(sources.log.facts.get("parameters_without_embeddings"))
    if shape is not None:
        parts = shape.parameters_by_part()
        parameters = shape.parameters
        without = parameters - sum(count for name, count in parts.items() if "embedding" in name)
    if parameters is not None:
        sources.origin.setdefault("parameters", sources.origin.get("shape", "log"))
    tokenizer = sources.first(
        "tokenizer", sources.in_log("tokenizer", word),
        ("data", _tokenizer_of(vocabulary, dataset, sources.log)),
        ("log", _by_first_loss(sources)),
    )  # fmt: skip
    return Model(shape, parameters, without, flops, vocabulary, tokenizer)


# --- what the log counts ------------------------------------------------------------------------


def _printed_count(sources: Sources) -> int | None:
    """nanoGPT's is without position embeddings."""
    where, count = sources.in_log("parameters", number)
    if count is None or not 1 <= count < 10**15:
        return None
    sources.origin["parameters"] = where
    return round(count)


def _counted(shape: Shape, log: Log) -> int:
    """As the log's trainer would count it."""
    positions = shape.block_size * shape.n_embd if shape.arch == "gpt2" and log.format == NANOGPT else 0
    return shape.parameters - positions


def _agrees(shape: Shape, printed: int | None, sources: Sources) -> bool:
    if printed is None:
        return True
    near = _NEAR_IN_PROSE if sources.origin["parameters"] == "prose" else _NEAR
    counts = (_counted(shape, sources.log), shape.parameters)
    return any(abs(count / printed - 1) <= near for count in counts)


# --- the vocabulary -----------------------------------------------------------------------------


def _said_vocabulary(sources: Sources, dataset: str | None) -> Iterator[tuple[str, int | None]]:
    """By the log, the config, the data, and by data whose tokens are known whoever trains on them."""
    yield sources.in_log("vocab_size", whole)
    yield sources.in_config("vocab_size")
    here = data_here(dataset) if sources.config is not None else None
    yield "data", here.vocabulary if here is not None else None
    if dataset in OWN_TOKENS:
        yield "data", embedding_rows(*OWN_TOKENS[dataset])


def first_loss(log: Log) -> float | None:
    """Of a model that has learnt nothing: the log's, at step 0."""
    for columns, name in ((log.evaluations, "val"), (log.evaluations, "train"), (log.steps, "loss")):
        seen = columns.pairs(name)
        if seen and seen[0][0] == 0 and math.isfinite(seen[0][1]):
            return seen[0][1]
    return None


def _from_scratch(sources: Sources) -> bool:
    """As far as anybody says: a first loss of other weights is not that of the vocabulary."""
    _where, begun = sources.in_log("init_from", word)
    begun = begun or (sources.config.init_from if sources.config is not None else "scratch")
    return begun in ("scratch", "auto") and begun not in PRETRAINED


def _by_first_loss(sources: Sources) -> str | None:
    """nanoGPT's log(50304) is 10.83; characters are about 65."""
    loss = first_loss(sources.log) if _from_scratch(sources) else None
    if loss is None or sources.log.format in (*NANOCHATS, HUGGINGFACE):
        return None
    begins = {"gpt2": _GPT2_BEGINS, "char": _CHARACTERS_BEGIN, "byte": _BYTES_BEGIN}
    return next((name for name, (low, high) in begins.items() if low <= loss <= high), None)


def _tokenizer_of(vocabulary: int | None, dataset: str | None, log: Log) -> str | None:
    if vocabulary is None:
        return None
    if dataset in OWN_TOKENS and embedding_rows(*OWN_TOKENS[dataset]) == vocabulary:
        return OWN_TOKENS[dataset][0]
    of_nanochat = log.format in NANOCHATS
    exact = {32_000: "llama2", 50_277: "gpt-neox", 50_432: "gpt-neox", 256: "byte", 257: "byte", 320: "byte"}
    if vocabulary in exact:
        return exact[vocabulary]
    if of_nanochat and vocabulary in (32_768, 65_536):
        return "nanochat-32k" if vocabulary == 32_768 else "nanochat-65k"
    if 50_257 <= vocabulary <= 50_368:
        return "gpt2"
    return "char" if vocabulary in _FEW else None


# --- the shape ----------------------------------------------------------------------------------


def _shape_of_config(sources: Sources, printed: int | None, vocabulary: int | None) -> Shape | None:
    config = sources.config
    if config is None:
        return None
    assumed = vocabulary is None
    rows = vocabulary or vocabulary_of(config, data_here(config.dataset) or NO_DATA)
    try:
        shape: Shape = config.shape(rows)
    except UserError as error:
        sources.notes.append(error.what)
        return None
    if assumed and (better := _other_vocabulary(shape, printed, sources)) is not None:
        shape = config.shape(better)
    if not _agrees(shape, printed, sources):
        sources.notes.append(
            _(
                "the config's model has {config:.2f}M parameters, the log's {log:.2f}M: it is another run's, "
                "its shape is not used, but its steps and evaluations are"
            ).format(config=_counted(shape, sources.log) / 1e6, log=(printed or 0) / 1e6)
        )
        return None
    sources.origin["shape"] = sources.config_origin
    return shape


def _other_vocabulary(shape: Shape, printed: int | None, sources: Sources) -> int | None:
    """Where nobody says the vocabulary, the log's count of parameters does, or its first loss."""
    assumed, found, text = shape.vocab_size, None, ""
    loss = first_loss(sources.log)
    if printed is not None and not _agrees(shape, printed, sources):
        rest = _counted(shape, sources.log) - assumed * shape.n_embd
        rows = (printed - rest) / shape.n_embd if shape.arch == "gpt2" else 0
        near = min(_USUAL, key=lambda usual: abs(usual - rows))
        # The count is printed to 0.01M, and a vocabulary is padded to a multiple of 64.
        if abs(near - rows) <= 0.005e6 / shape.n_embd + 64:
            found = near
        elif round(rows) in _FEW:
            found = round(rows)
        text = _(
            "the log's {millions:.2f}M parameters are those of a vocabulary of about {found:,}, not of "
            "{assumed:,}: the log counts"
        )
    elif "flops_per_token" in sources.log.facts:
        return None  # the run's own plan or checkpoint says more than a guess from its losses
    elif _by_first_loss(sources) in ("char", "byte") and assumed not in _FEW:
        found = round(math.exp(loss or 0.0))
        text = _(
            "a first loss of {loss:.2f} is that of a vocabulary of about {found:,}, not of {assumed:,}: the "
            "log counts"
        )
    if found is None:
        return None
    sources.origin["vocab_size"] = "log"
    values = {"millions": (printed or 0) / 1e6, "found": found, "assumed": assumed, "loss": loss}
    sources.notes.append(text.format(**values))
    return found


def _shape_of_log(sources: Sources, printed: int | None, vocabulary: int | None) -> Shape | None:
    """By what the log's head says; what nanoGPT does not print there is at its default."""
    log = sources.log
    shape = _nanochat_of(sources, printed) if log.format in NANOCHATS else None
    if shape is None and log.format not in (*NANOCHATS, HUGGINGFACE):
        shape = _gpt2_of(sources, printed, vocabulary)
    if shape is not None:
        sources.origin["shape"] = sources.in_log("n_embd", whole)[0]
    return shape


def _gpt2_of(sources: Sources, printed: int | None, vocabulary: int | None) -> GPT2Shape | None:
    said = {name: sources.in_log(name, whole)[1] for name in _USUAL_SIZES}
    whole_head = sources.log.format == NANOGPT and (printed is not None or said["n_embd"])
    if not whole_head and not said["n_embd"]:
        return None
    sizes = {name: said[name] or usual for name, usual in _USUAL_SIZES.items()}
    bias = switch(dict(sources.log.settings).get("bias")) is True
    rows = vocabulary or GPT2_PADDED_VOCABULARY
    if any(size > LARGEST[name] for name, size in (*sizes.items(), ("vocab_size", rows))):
        return None
    shape = GPT2Shape(sizes["n_layer"], sizes["n_head"], sizes["n_embd"], rows, sizes["block_size"], bias)
    if vocabulary is None and (better := _other_vocabulary(shape, printed, sources)) is not None:
        shape = GPT2Shape(
            sizes["n_layer"], sizes["n_head"], sizes["n_embd"], better, sizes["block_size"], bias
        )
    # Of a nanoGPT head that is cut, or of prose, the sizes may be at other values than the defaults.
    complete = all(said[name] for name in ("n_layer", "n_head", "n_embd"))
    if not _agrees(shape, printed, sources) or (printed is None and not complete and not whole_head):
        return None
    return shape


def _nanochat_of(sources: Sources, printed: int | None) -> Shape | None:
    """By its one dial, which the count of parameters gives away."""
    log = sources.log
    generation = dial.GENERATIONS[2025 if log.format == NANOCHAT_2025 else 2026]
    rows = sources.in_log("vocab_size", whole)[1] or generation.vocab_size
    block_size = sources.in_log("block_size", whole)[1] or 2048
    depth = whole(log.settings.get("depth"))
    if depth is None and printed is None:
        return None
    for deep in (depth,) if depth else range(1, _DEEPEST + 1):
        if deep > _DEEPEST:
            return None
        shape: Shape = generation.shape.of_depth(deep, rows, block_size)
        if printed is None or abs(shape.parameters / printed - 1) < 0.005:
            return shape
    return None
