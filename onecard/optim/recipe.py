"""The rule of every parameter: nanoGPT's groups, nanochat's of both generations, Muon for GPT-2."""

from __future__ import annotations

from torch import Size

from onecard.arch.dial import batch_lr_scale, decay_scale, width_lr_scale
from onecard.arch.shapes import Shape
from onecard.config.run import RunConfig
from onecard.optim.rules import AdamWRule, MuonRule, Rule, Rules, adamw_for_all

_EPSILON = 1e-10  # nanochat's


def rules_of(config: RunConfig, shape: Shape) -> Rules:
    """The rules of a run, by parameter name, without tied heads."""
    betas = config.beta1, config.beta2
    if not config.by_muon:
        return adamw_for_all(betas, config.weight_decay)
    if config.arch == "gpt2":
        return _gpt2_by_muon(config)
    return _nanochat_2025(config, shape) if config.generation == 2025 else _nanochat_2026(config, shape)


def _in_layers(name: str, shape: Size) -> bool:
    return name.startswith("transformer.h.") and len(shape) == 2


def _gpt2_by_muon(config: RunConfig) -> Rules:
    """Muon for matrices inside layers, with the decay per step that AdamW would have; AdamW for the rest."""
    betas, rate = (config.beta1, config.beta2), config.learning_rate
    decay = config.weight_decay * rate / config.muon_lr if config.muon_lr else 0.0
    muon = MuonRule(config.muon_lr, decay)

    def rule(name: str, shape: Size) -> Rule:
        if _in_layers(name, shape):
            return muon
        return AdamWRule(betas, config.weight_decay if len(shape) >= 2 else 0.0, lr=rate)

    return rule


def _nanochat_2025(config: RunConfig, shape: Shape) -> Rules:
    matrix, embedding, unembedding, _ = _base_rates(config, shape)
    # The weight decay is that of embedding and head; Muon had none in 2025.
    muon, betas, decay = MuonRule(matrix), (0.8, 0.95), config.weight_decay
    by_name = {
        "transformer.wte.weight": AdamWRule(betas, decay, embedding, _EPSILON),
        "lm_head.weight": AdamWRule(betas, decay, unembedding, _EPSILON),
    }
    return lambda name, size: muon if _in_layers(name, size) else by_name[name]


def _nanochat_2026(config: RunConfig, shape: Shape) -> Rules:
    matrix, embedding, unembedding, scalar = _base_rates(config, shape)
    scaled = decay_scale(2026, shape.n_layer, shape.vocab_size, config.tokens_per_step)
    muon = MuonRule(matrix, config.weight_decay * scaled, refined=True)
    usual = (0.8, 0.95)
    by_name = {
        "lm_head.weight": AdamWRule((0.8, 0.96), 0.01, unembedding, _EPSILON),
        "transformer.wte.weight": AdamWRule((0.8, 0.995), 0.001, embedding, _EPSILON),
        "resid_lambdas": AdamWRule(usual, 0.05, 0.01 * scalar, _EPSILON),
        # They begin small and connect many layers to the input: averages over more steps.
        "x0_lambdas": AdamWRule((0.96, 0.95), 0.0, scalar, _EPSILON),
    }
    value_embeddings = AdamWRule((0.8, 0.995), 0.01, 0.5 * embedding, _EPSILON)
    the_rest = AdamWRule(usual, 0.0, 0.2, _EPSILON)  # smear and backout

    def rule(name: str, size: Size) -> Rule:
        if _in_layers(name, size):
            return muon
        if name.startswith("value_embeds."):
            return value_embeddings
        return by_name.get(name, the_rest)

    return rule


def _base_rates(config: RunConfig, shape: Shape) -> tuple[float, float, float, float]:
    """Rates of matrices, embeddings, head and scalars: nanochat's, scaled to this batch and width."""
    knobs = (config.matrix_lr, config.embedding_lr, config.unembedding_lr, config.scalar_lr)
    assert all(rate is not None for rate in knobs), "resolved"
    batch = batch_lr_scale(config.generation, config.tokens_per_step)
    matrix, embedding, unembedding, scalar = (batch * rate for rate in knobs if rate is not None)
    width = width_lr_scale(shape.n_embd)
    return matrix, embedding * width, unembedding * width, scalar
