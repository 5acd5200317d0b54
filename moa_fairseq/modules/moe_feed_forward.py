"""A feed-forward whose hidden layer is a mixture of experts, routed as MoA's heads are."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Callable, Iterator, Optional

from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from .expert_linear import ExpertLinear
from .expert_products import AUTO, choose_backend, dispatch
from .routing import Router

ENCODER_FFN = "encoder-ffn"
DECODER_FFN = "decoder-ffn"
FEED_FORWARD_KINDS = (ENCODER_FFN, DECODER_FFN)

# fairseq's layers call their feed-forward with the tokens alone. What is padding reaches it
# through here, and not through the module, on which nothing of a batch may stay.
_padding: ContextVar[Optional[Tensor]] = ContextVar("padding", default=None)


@contextmanager
def padding_of_tokens(mask: Optional[Tensor]) -> Iterator[None]:
    """Say which tokens are padding to the feed-forwards that run inside the `with` block.

    Args:
        mask: `[batch, T]`, true where a token is padding; None where none is.
    """
    token = _padding.set(mask)
    try:
        yield
    finally:
        _padding.reset(token)


class MixtureOfFeedForwards(nn.Module):
    """y_t = Σ_{i∈S_t} w_{i,t}·FFN_i(x_t), with FFN_i(x) = W²_i·φ(W¹_i·x + b¹_i) + b²_i.

    Every expert is a whole feed-forward of its own, φ the activation with its dropout. As in
    MoA, the matrix W²_i of an expert (and its bias) is `output_scale` times what is stored.

    Args:
        embed_dim: d, size of tokens and of the output.
        hidden_dim: F, size of each expert's hidden layer.
        num_selected: K, experts that a token uses.
        num_experts: E.
        activation: φ, applied to hidden layers.
        activation_dropout: probability of dropping a hidden unit.
        kind: one of `FEED_FORWARD_KINDS`.
        gate_normalization, router_noise, router_init_std: see :class:`Router`.
        quant_noise_pq, quant_noise_block_size: fairseq's quantization noise.
        expert_backend: how products with experts are computed, one of
            :data:`~moa_fairseq.modules.expert_products.BACKENDS`.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_selected: int,
        num_experts: int,
        activation: Callable[[Tensor], Tensor],
        activation_dropout: float = 0.0,
        kind: str = ENCODER_FFN,
        gate_normalization: str = "detached",
        router_noise: bool = False,
        router_init_std: float = 0.02,
        quant_noise_pq: float = 0.0,
        quant_noise_block_size: int = 8,
        expert_backend: str = AUTO,
    ) -> None:
        super().__init__()
        if kind not in FEED_FORWARD_KINDS:
            raise ValueError(
                f"unknown kind of feed-forward {kind!r}; one of {', '.join(FEED_FORWARD_KINDS)}"
            )
        self.num_selected = num_selected
        self.num_experts = num_experts
        self.hidden_dim = hidden_dim
        self.kind = kind
        self.expert_backend = expert_backend
        self.activation = activation
        self.dropout_module = FairseqDropout(activation_dropout, module_name=type(self).__name__)
        # As in MoA attention: gates are about 1/K, or 1/E where they are plain probabilities.
        self.output_scale = num_experts if gate_normalization == "none" else num_selected
        self.router = Router(
            embed_dim,
            num_experts,
            num_selected,
            gate_normalization,
            router_noise,
            init_std=router_init_std,
        )
        experts = functools.partial(
            ExpertLinear,
            num_experts,
            bias=True,
            quant_noise=quant_noise_pq,
            quant_noise_block_size=quant_noise_block_size,
        )
        # Weights have the variance of fairseq's feed-forward, 1/(3·in). The sum of K experts'
        # outputs, each of them multiplied by a gate times `output_scale` of about 1, shall be no
        # larger than the output of one feed-forward.
        self.in_experts = experts(embed_dim, hidden_dim, init_std=(3 * embed_dim) ** -0.5)
        self.out_experts = experts(
            hidden_dim, embed_dim, init_std=(3 * hidden_dim * num_selected) ** -0.5
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """`[T, batch, d]` to `[T, batch, d]`; zero for the padding of :func:`padding_of_tokens`."""
        length, batch, embed_dim = tokens.shape
        padding = _padding.get()
        routing = self.router(tokens.transpose(0, 1))  # of [batch, T, d], as recorded
        self.router.record(routing)
        gates = routing.gates
        if padding is not None:
            padding = padding.bool()
            gates = gates.masked_fill(padding.unsqueeze(-1), 0.0)
        backend = choose_backend(
            self.expert_backend,
            self.num_selected,
            self.num_experts,
            tokens,
            [embed_dim, self.hidden_dim],
        )
        plan = dispatch(
            routing.indices.flatten(0, 1),  # [batch*T, K]
            self.num_experts,
            None if padding is None else padding.flatten(),  # [batch*T]
            backend,
        )
        rows = tokens.transpose(0, 1).reshape(-1, embed_dim)  # [batch*T, d]
        hidden = self.activation(self.in_experts.project_tokens(rows, plan))  # [batch*T, K, F]
        output = self.out_experts.combine_heads(
            self.dropout_module(hidden),
            gates.flatten(0, 1) * self.output_scale,  # [batch*T, K]
            plan,
        )
        return output.view(batch, length, embed_dim).transpose(0, 1)  # [T, batch, d]
