"""What all architectures share: tokens to loss through layers, decoding, weights and totals by name.

Modules hold the weights and their names; what a layer computes is in the architecture's block module.
Gradients do not go through autograd to the weights: whoever trains gives every weight a total
(`use_totals`), to which the backward pass adds.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onecard.arch.layout import default_chunk
from onecard.model.attention import usual_kernel
from onecard.model.compiling import limit_recompiling
from onecard.model.dropout import DropoutKeys, keys_for_layers
from onecard.model.layers import LayerCache
from onecard.model.loss import LossOptions, chunk_loss_, linear_cross_entropy
from onecard.model.loss_kernel import with_kernel
from onecard.model.recompute import Layer, run_layer

# Without cuDNN's: it builds a plan for every new length, and in decoding every length is new.
_DECODING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Rows of loss_sums' second look: few, so that the uncompiled loss needs little memory beside the first.
_APART_CHUNK = 128

# Weights of a layer, or their totals: the architecture's own NamedTuple.
Tensors = Any
D = TypeVar("D", bound="Decoder")


class Parts(NamedTuple):
    """The functions a step is made of, plain or compiled."""

    block_forward: Callable[..., tuple[Tensor, ...]]
    block_backward: Callable[..., Tensor]
    norm_forward: Callable[..., tuple[Tensor, ...]]
    norm_backward: Callable[..., Tensor | tuple[Tensor, ...]]
    chunk_loss: Callable[..., Tensor]


class LayerVisitor(Protocol):
    """Told when a layer's totals are about to be added to, and when they have been."""

    def begin(self, layer: int) -> None: ...
    def end(self, layer: int) -> None: ...


@dataclass(frozen=True)
class LayerRun:
    """One layer in one micro-batch: what run_layer needs to know of it."""

    parts: Parts
    spec: Any
    number: int
    weights: Tensors
    totals: Tensors | None
    beside: Any  # what its functions need besides x: dropout's keys, rotary angles, what all layers share
    noise_key: Tensor | None
    visitor: LayerVisitor | None

    def forward(self, x_BTD: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        assert not others, "what comes from elsewhere is in `beside`"
        return self.parts.block_forward(x_BTD, self.weights, self.spec, self.beside)

    def backward(self, dout_BTD: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        assert self.totals is not None
        if self.visitor is not None:
            self.visitor.begin(self.number)
        dx_BTD = self.parts.block_backward(
            dout_BTD, kept, self.weights, self.totals, self.spec, self.beside, self.noise_key
        )
        if self.visitor is not None:
            self.visitor.end(self.number)
        return dx_BTD


@dataclass(frozen=True)
class NormRun:
    """The last norm, likewise: it keeps its inputs. Its tensors are weights and totals, as it has them."""

    parts: Parts
    weights: tuple[Tensor | None, ...]
    totals: tuple[Tensor | None, ...]
    dtype: torch.dtype

    def forward(self, x_BTD: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.parts.norm_forward(x_BTD, *others, self.dtype, *self.weights)

    def backward(self, dn_BTD: Tensor, kept: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return self.parts.norm_backward(dn_BTD, *kept, *self.weights, *self.totals)


class Decoder(nn.Module):
    """A language model that predicts the next token. Subclasses are architectures."""

    lm_head: nn.Linear
    transformer: Any
    kept_fields: Mapping[str, int]  # by the setting of `recompute`
    loss_options = LossOptions()
    head_name = "lm_head.weight"  # the parameter that the head's gradient belongs to
    middle_layer: int | None = None  # whose output the last norm takes too, where it does

    def __init__(self, shape: Any, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.recompute, self.loss_chunk = "none", default_chunk(shape.vocab_size)
        self.attention_kernel: str | None = None  # one of attention.py's; None: one that works
        self.compiled = False
        self._parts = parts
        self._totals: dict[str, Tensor] = {}
        self._layer_weights: list[Tensors] = []
        self._layer_totals: list[Tensors] = []
        self._visitor: LayerVisitor | None = None

    # --- what an architecture is
    @property
    @abstractmethod
    def spec(self) -> Any:
        """What is constant in all layers, and compiled in."""

    def layer_specs(self) -> list[Any]:
        """`spec` for every layer, where layers are of several kinds; each kind is compiled once."""
        return [self.spec] * self.shape.n_layer

    def one_of_each_kind(self) -> list[int]:
        """Layers in which all that any layer has compiled is, and the last norm as well."""
        specs = self.layer_specs()
        found = [number for number, spec in enumerate(specs) if spec not in specs[:number]]
        # One that takes two layers' outputs is compiled anew where they are not the same tensor.
        return [0, 1] if len(found) == 1 < len(specs) and self.middle_layer is not None else found

    def _place(self, name: str) -> tuple[int, str] | None:
        """The layer a parameter belongs to and its name within, None where it belongs to none."""
        if not name.startswith("transformer.h."):
            return None
        _, _, layer, within = name.split(".", 3)
        return int(layer), within

    @abstractmethod
    def _block_tensors(self, by_name: Mapping[str, Tensor]) -> Tensors:
        """A layer's tensors in the order its functions take, from names within the layer."""

    @abstractmethod
    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        """Fill one parameter with its fresh values."""

    @abstractmethod
    def _begin(self, tokens_BT: Tensor, first_position: int, dropout: DropoutKeys | None) -> Tensor:
        """The residual stream that enters the first layer."""

    @abstractmethod
    def _begin_backward(
        self, tokens_BT: Tensor, dx_BTD: Tensor, beside: list[Any], dropout: DropoutKeys | None
    ) -> None:
        """Add the gradients of what `_begin` and `_beside` are made of to their totals."""

    def _begin_decoding(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """`_begin` of tokens that follow those in the cache."""
        return self._begin(tokens_BT, cache[0].length, None)

    @abstractmethod
    def _beside(
        self, tokens_BT: Tensor, x_BTD: Tensor, first_position: int, dropout: DropoutKeys | None
    ) -> list[Any]:
        """For every layer, what its functions take besides x, of what enters the first layer."""

    @abstractmethod
    def use_block_size(self, block_size: int) -> None:
        """Train and sample with sequences of another length than the weights came with."""

    @abstractmethod
    def _last_norm(self) -> Layer: ...

    @abstractmethod
    def _decode_layer(
        self, x_BTD: Tensor, weights: Tensors, spec: Any, beside: Any, cache: LayerCache
    ) -> Tensor: ...

    # --- weights and totals
    @classmethod
    def uninitialised(cls: type[D], shape: Any) -> D:
        """On the CPU, with whatever the memory held: for those who fill every tensor themselves."""
        with torch.device("meta"):
            model = cls(shape)  # type: ignore[call-arg]  # an architecture brings its own parts
        model.to_empty(device="cpu")
        model._tie()  # to_empty unties
        return model

    @classmethod
    def initialised(cls: type[D], shape: Any, seed: int, matrices: torch.dtype = torch.float32) -> D:
        """Fresh weights. Each tensor has a generator of its own, seeded by its name, on the CPU: the same
        seed gives the same weights on every device and whatever else the model contains. `matrices` are
        rounded one by one, so that a large model is never there in fp32."""
        model = cls.uninitialised(shape)
        for name, parameter in model.named_parameters():
            model._initialise(name, parameter.data, seed)
            if parameter.dim() >= 2:
                parameter.data = parameter.data.to(matrices)
        return model

    def _tie(self) -> None:
        """Make shared weights shared again."""

    def use_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these tensors from now on (by parameter name, a tied head left out)."""
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        self._tie()
        self._layer_weights = []

    def use_totals(self, totals: Mapping[str, Tensor], visitor: LayerVisitor | None = None) -> None:
        """Add gradients to these tensors from now on."""
        self._visitor = visitor
        self._totals = dict(totals)
        self._layer_totals = self._by_layer(totals)

    def forget_totals(self) -> None:
        """Add gradients nowhere until `use_totals` says where."""
        self._visitor, self._totals, self._layer_totals = None, {}, []

    def _by_layer(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        of_layer: list[dict[str, Tensor]] = [{} for _ in range(self.shape.n_layer)]
        for name, tensor in tensors.items():
            place = self._place(name)
            if place is not None:
                of_layer[place[0]][place[1]] = tensor
        return [self._block_tensors(by_name) for by_name in of_layer]

    def layer_matrices(self) -> set[str]:
        """Names of the matrices inside layers: their totals may be bf16."""
        return {
            name
            for name, parameter in self.named_parameters()
            if name.startswith("transformer.h.") and parameter.dim() == 2
        }

    def _layers(self) -> list[Tensors]:
        """Every layer's weights, collected once: walking the modules takes as long as a small layer."""
        if not self._layer_weights:
            self._layer_weights = self._by_layer(dict(self.named_parameters()))
        return self._layer_weights

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._layer_weights = []  # .to() and its kin may put other tensors in their place
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile a layer's two passes: layers of a kind share one compilation, and start-up stays short."""
        import torch._dynamo

        limit_recompiling(kinds=len(set(self.layer_specs())))

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)

        parts = Parts(*map(compiled, self._parts))
        self._parts = parts._replace(chunk_loss=with_kernel(compiled(chunk_loss_)))
        self.compiled = True

    def kernel(self) -> str:
        """The attention kernel to compute with."""
        head = self.lm_head.weight
        return self.attention_kernel or usual_kernel(self.shape.head_dim, head.dtype, head.device)

    # --- tokens in, loss or logits out
    def loss_sum(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        dropout: DropoutKeys | None = None,
        *,
        scale: Tensor | None = None,
        noise_key: Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Summed loss of all targets that are not loss.IGNORE.

        With a `scale` (0-dim), the gradients of scale × loss are added to the totals. `noise_key`
        (0-dim int32) decides how totals in bf16 are rounded. `layers`: through these only, which says
        nothing about the tokens, and has every kernel compiled where they are one of each kind.
        """
        training = scale is not None
        with torch.set_grad_enabled(training):
            x_BTD = self._begin(tokens_BT, 0, dropout).requires_grad_(training)
            beside = self._beside(tokens_BT, x_BTD, 0, dropout)
            n_BTD = self._through_layers(x_BTD, beside, noise_key, layers)
            loss = linear_cross_entropy(
                n_BTD.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(),
                chunk=self.loss_chunk, scale=scale, options=self.loss_options,
                chunk_loss=self._parts.chunk_loss, head_total_VD=self._totals.get(self.head_name),
            )  # fmt: skip
            del n_BTD  # the backward pass keeps what it needs of it, which is nothing
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
                assert x_BTD.grad is not None
                self._begin_backward(tokens_BT, x_BTD.grad, beside, dropout)
        return loss.detach()

    @torch.no_grad()
    def loss_sums(self, tokens_BT: Tensor, targets_BT: Tensor, apart_R: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of all targets, as loss_sum's, and that of the targets at `apart_R` of all B×T.

        The layers run once; only the head sees the rows apart a second time.
        """
        x_ND, targets_N = self.hidden(tokens_BT).flatten(0, 1), targets_BT.flatten()
        head_VD = self.lm_head.weight
        total = linear_cross_entropy(
            x_ND, head_VD, targets_N,
            chunk=self.loss_chunk, options=self.loss_options, chunk_loss=self._parts.chunk_loss,
        )  # fmt: skip
        # Not the compiled loss: it would be compiled anew for every number of rows there is.
        apart = linear_cross_entropy(
            x_ND[apart_R], head_VD, targets_N[apart_R],
            chunk=min(self.loss_chunk, _APART_CHUNK), options=self.loss_options,
        )  # fmt: skip
        return total, apart

    def _through_layers(
        self,
        x_BTD: Tensor,
        beside: list[Any],
        noise_key: Tensor | None,
        only: Sequence[int] | None = None,
    ) -> Tensor:
        """From the embedding to the normalised last hidden state."""
        n_layer, middle_layer = self.shape.n_layer, self.middle_layer
        if only is not None and middle_layer is not None:
            # The norm takes two inputs all the same: one and the same where it does in a real pass.
            middle_layer = only[-1 if middle_layer == n_layer - 1 else 0]
        nothing: list[None] = [None] * n_layer
        totals = self._layer_totals if torch.is_grad_enabled() else nothing
        # A key of its own for every layer's rounding, for the same reason as dropout's.
        noise = nothing if noise_key is None else keys_for_layers(noise_key[None], n_layer)[:, 0]
        layers = list(zip(self.layer_specs(), self._layers(), totals, beside, noise, strict=True))
        middle: tuple[Tensor, ...] = ()
        for number in range(n_layer) if only is None else only:
            spec, weights, total, extra, key = layers[number]
            layer = LayerRun(self._parts, spec, number, weights, total, extra, key, self._visitor)
            x_BTD = run_layer(x_BTD, layer, self.kept_fields[self.recompute])
            if number == middle_layer:
                middle = (x_BTD,)
        return run_layer(x_BTD, self._last_norm(), 1, *middle)

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, dropout: DropoutKeys | None = None) -> Tensor:
        """The normalised last hidden state."""
        x_BTD = self._begin(tokens_BT, 0, dropout)
        return self._through_layers(x_BTD, self._beside(tokens_BT, x_BTD, 0, dropout), None)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of every position."""
        return self._capped(F.linear(self.hidden(tokens_BT), self.lm_head.weight))

    def new_cache(self, batch: int, capacity: int) -> list[LayerCache]:
        """Room for `capacity` tokens."""
        head = self.lm_head.weight
        size = (batch, self.shape.n_head, capacity, self.shape.head_dim)
        return [LayerCache(size, head.device, head.dtype) for _ in range(self.shape.n_layer)]

    @torch.no_grad()
    def next_logits(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits (B, V) after the last of these tokens; the cache holds what came before them."""
        position = cache[0].length
        x_BTD = self._begin_decoding(tokens_BT, cache)
        beside = self._beside(tokens_BT, x_BTD, position, None)
        layers = zip(self._layers(), self.layer_specs(), beside, cache, strict=True)
        middle: tuple[Tensor, ...] = ()
        with sdpa_kernel(_DECODING_BACKENDS):
            for number, layer in enumerate(layers):
                x_BTD = self._decode_layer(x_BTD, *layer)
                if number == self.middle_layer:
                    middle = (x_BTD[:, -1:],)
        last_B1D = self._last_norm().forward(x_BTD[:, -1:], *middle)[0]
        return self._capped(F.linear(last_B1D[:, 0], self.lm_head.weight))

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.loss_options.softcap
        return softcap * torch.tanh(logits.float() / softcap) if softcap else logits


def seed_of(seed: int, name: str) -> int:
    """A generator's seed for one tensor."""
    # Not hash(): it is salted per process.
    value = seed
    for byte in name.encode():
        value = (value * 1_000_003 + byte) % (2**61 - 1)
    return value
