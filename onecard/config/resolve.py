"""What follows from a config and the data it names, the same for every verb: vocabulary, horizon, shape.

plan, eta and bench ask before there is data, train when it is there. Somebody else's weights decide some of
it (train/start.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from onecard.arch import dial
from onecard.arch.layout import Setting, default_chunk
from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, PRETRAINED, Shape
from onecard.config.dataset import OWN_TOKENS, DataFacts, data_facts, embedding_rows
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.language import _


@dataclass(frozen=True)
class Resolved:
    """`config` has its horizon, and what a pretrained model decides."""

    config: RunConfig
    shape: Shape
    data: DataFacts


def resolve(config: RunConfig) -> Resolved:
    config, data = _as_pretrained(config), data_facts(config.dataset)
    vocabulary = vocabulary_of(config, data)
    config = with_vocabulary(config, vocabulary)
    shape: Any = config.shape(vocabulary)
    return Resolved(config, shape, data)


def vocabulary_of(config: RunConfig, data: DataFacts) -> int:
    """The config's, the data's, or the one such models usually have."""
    if config.vocab_size:
        return config.vocab_size
    if data.vocabulary is not None:
        return data.vocabulary
    if data.is_there:
        return GPT2_PADDED_VOCABULARY  # tokens that nobody has described are GPT-2's, as to nanoGPT
    if config.dataset in OWN_TOKENS:
        return embedding_rows(*OWN_TOKENS[config.dataset])
    if config.arch == "nanochat":
        return dial.GENERATIONS[config.generation].vocab_size
    return GPT2_PADDED_VOCABULARY


def with_vocabulary(config: RunConfig, vocabulary: int) -> RunConfig:
    """nanochat's horizon counts parameters, and with them the vocabulary."""
    if config.arch != "nanochat" or config.vocab_size is not None:
        return config
    return dataclasses.replace(config.without_schedule_notes(), vocab_size=vocabulary).resolved()


def _as_pretrained(config: RunConfig) -> RunConfig:
    """With the shape of OpenAI's model, where init_from names one."""
    if config.init_from not in PRETRAINED:
        return config
    model = PRETRAINED[config.init_from]
    if config.block_size > model.block_size:
        raise UserError(
            _("block_size {n} is longer than the checkpoint's {most}").format(
                n=config.block_size, most=model.block_size
            ),
            _("it has no position embeddings beyond that"),
            f"--block_size={model.block_size}",
        )
    return dataclasses.replace(
        config, arch="gpt2", n_layer=model.n_layer, n_head=model.n_head, n_embd=model.n_embd, bias=model.bias,
        vocab_size=model.vocab_size,
    )  # fmt: skip


def setting_of(config: RunConfig, shape: Shape) -> Setting:
    """What a run with this config does if nothing changes it."""
    return Setting(
        micro_batch=config.batch_size,
        loss_chunk=config.loss_chunk or default_chunk(shape.vocab_size),
        recompute=config.recompute or "none",
        offload=config.offload or "none",
        master_weights=config.master_weights or "fp32",
        optim_states=config.optim_states or "fp32",
        compile=config.compile,
        cuda_graphs=config.cuda_graphs,
    )
