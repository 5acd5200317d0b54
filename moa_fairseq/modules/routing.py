"""The router: which K of the E experts does each token use, and with what weight?

Plain PyTorch. Equations are numbered as in the paper (arXiv 2210.05144, section 3).
"""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GATE_NORMALIZATIONS = ("detached", "none", "topk-softmax")

# Keeps the noise scale away from zero, as in noisy top-k gating (Shazeer et al., 2017).
NOISE_FLOOR = 0.01


class Routing(NamedTuple):
    """What a router decided for every token of a batch.

    Attributes:
        logits: `[..., E]` float32, the router's scores x_t (with noise, if it was added).
        probabilities: `[..., E]` float32, p_t = softmax(x_t).
        indices: `[..., K]` int64, the selected experts by falling probability. With K = E
            nothing is selected, and experts stand in their own order.
        gates: `[..., K]` float32, the weight w_{i,t} of each selected expert.
    """

    logits: Tensor
    probabilities: Tensor
    indices: Tensor
    gates: Tensor


class RecordedRouting(NamedTuple):
    """A routing and where it came from.

    Attributes:
        name: the module's name in the model, `decoder.layers.0.encoder_attn`, say.
        kind: which attention or feed-forward it is.
        position: its place among the model's modules of that kind, counted from 0.
        routing: tensors of shape `[batch, length, ...]`, attached to the graph.
    """

    name: str
    kind: str
    position: int
    routing: Routing


class Recording(NamedTuple):
    """Where a router leaves its routings: a list, and what stands beside each of them there."""

    recorded: List[RecordedRouting]
    name: str
    kind: str
    position: int


class Router(nn.Module):
    """Scores E experts for every token and selects K of them (equations 1 and 4).

    All of it happens in float32, whatever the precision of the model: half precision
    rounds close probabilities to ties, and the sums behind the losses overflow.

    Args:
        embed_dim: d, the size of a token's representation.
        num_experts: E.
        num_selected: K, at most E.
        gate_normalization: how probabilities become gates; see :func:`compute_gates`.
        noise: adds a learned amount of Gaussian noise to the logits in training.
        sample_topk: how many of the K experts are sampled in training instead of taken by
            rank; 0 samples none.
        init_std: standard deviation of the initial weights. It must be positive, since equal
            weights send every token to the same K experts.
    """

    # Only while someone records. Not forward hooks: a model that torch.compile has traced without
    # them never calls them.
    recordings: Tuple[Recording, ...] = ()

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        num_selected: int,
        gate_normalization: str = "detached",
        noise: bool = False,
        sample_topk: int = 0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if not 1 <= num_selected <= num_experts:
            raise ValueError(f"cannot select {num_selected} of {num_experts} experts")
        self.num_selected = num_selected
        self.gate_normalization = gate_normalization
        self.sample_topk = sample_topk
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(embed_dim, num_experts))  # W_g [d, E]
        self.noise_weight = nn.Parameter(torch.empty(embed_dim, num_experts)) if noise else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.noise_weight is not None:
            nn.init.zeros_(self.noise_weight)

    def forward(self, tokens: Tensor) -> Routing:
        """Route `tokens` of shape `[..., d]`; returns a :class:`Routing`."""
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float()
            logits = tokens @ self.weight.float()  # x_t = q_t W_g
            if self.noise_weight is not None and self.training:
                scale = F.softplus(tokens @ self.noise_weight.float()) + NOISE_FLOOR
                logits = logits + torch.randn_like(logits) * scale
            probabilities = torch.softmax(logits, dim=-1)  # p_t = softmax(x_t)
            sampled = self.sample_topk if self.training else 0
            indices = select_experts(probabilities, self.num_selected, sampled)
            gates = compute_gates(logits, probabilities, indices, self.gate_normalization)
        return Routing(logits, probabilities, indices, gates)

    def record(self, routing: Routing) -> None:
        """Leave a routing that is used with whoever records."""
        for recorded, name, kind, position in self.recordings:
            recorded.append(RecordedRouting(name, kind, position, routing))

    def extra_repr(self) -> str:
        embed_dim, num_experts = self.weight.shape
        return (
            f"embed_dim={embed_dim}, num_experts={num_experts}, "
            f"num_selected={self.num_selected}, gate_normalization={self.gate_normalization}"
        )


def select_experts(probabilities: Tensor, num_selected: int, num_sampled: int = 0) -> Tensor:
    """S_t: the K experts with the largest probability (equation 1).

    Args:
        probabilities: `[..., E]`.
        num_selected: K.
        num_sampled: how many of the K are drawn from the probabilities of the experts that
            the others left, without replacement.

    Returns:
        `[..., K]` int64 indices, those taken by rank first.
    """
    num_experts = probabilities.shape[-1]
    if num_selected == num_experts:
        return torch.arange(num_experts, device=probabilities.device).expand(probabilities.shape)
    ranked = torch.topk(probabilities.detach(), num_selected - num_sampled, dim=-1).indices
    if num_sampled == 0:
        return ranked
    # The smallest normal number keeps an underflowed expert drawable: multinomial needs
    # num_sampled candidates above zero. What is already taken has none. NaN must reach the
    # loss, where training stops and says which router it was, and not stop the draw.
    smallest = torch.finfo(probabilities.dtype).tiny
    remaining = probabilities.detach().nan_to_num(nan=smallest).clamp(min=smallest)
    remaining = remaining.scatter(-1, ranked, 0.0).reshape(-1, num_experts)  # [N, E]
    drawn = torch.multinomial(remaining, num_sampled)  # [N, sampled]
    drawn = drawn.reshape(*ranked.shape[:-1], num_sampled)  # [..., sampled]
    return torch.cat((ranked, drawn), dim=-1)


def compute_gates(
    logits: Tensor, probabilities: Tensor, indices: Tensor, normalization: str = "detached"
) -> Tensor:
    """w_{i,t}: the weight of each selected expert (equation 4).

    Args:
        logits: `[..., E]`.
        probabilities: `[..., E]`.
        indices: `[..., K]`, the selected experts; with K = E, 0 to E - 1.
        normalization: `detached` (the paper) divides by the sum of the selected
            probabilities and lets no gradient through that sum, so that unselected logits
            still learn from the task; `none` (the authors' code) takes the probabilities as
            they are; `topk-softmax` (JetMoE) is a softmax over the selected logits alone.

    Returns:
        `[..., K]` gates.

    Raises:
        ValueError: for another normalization.
    """
    if normalization not in GATE_NORMALIZATIONS:
        raise ValueError(
            f"unknown gate normalization {normalization!r}; "
            f"choose from {', '.join(GATE_NORMALIZATIONS)}"
        )
    if indices.shape == probabilities.shape:
        return probabilities  # of all experts, in their own order, they sum to 1
    if normalization == "topk-softmax":
        return torch.softmax(logits.gather(-1, indices), dim=-1)
    selected = probabilities.gather(-1, indices)
    if normalization == "none":
        return selected
    return selected / selected.sum(dim=-1, keepdim=True).detach()
