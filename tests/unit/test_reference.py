"""The module against numbers computed by the authors' code (reference files, one module each)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moa_fairseq.modules.moa_attention import (
    CROSS,
    DECODER_SELF,
    ENCODER_SELF,
    MixtureOfAttentionHeads,
)
from moa_fairseq.modules.recording import record_routings
from moa_fairseq.modules.router_losses import (
    cv_squared_loss,
    load_balancing_loss,
    router_z_loss,
)

from ..paths import reference_files

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def load(path):
    with np.load(path) as archive:
        return {
            name: archive[name].item()
            if archive[name].ndim == 0
            else torch.from_numpy(archive[name])
            for name in archive.files
        }


def build(reference):
    cross = "grad_key" in reference
    causal = reference.get("causal", False)
    module = MixtureOfAttentionHeads(
        reference["embed_dim"],
        reference["num_heads"],
        reference["num_experts"],
        reference["head_dim"],
        kind=CROSS if cross else DECODER_SELF if causal else ENCODER_SELF,
        gate_normalization="none",
    )
    with torch.no_grad():
        module.router.weight.copy_(reference["gate"])
        module.q_experts.weight.copy_(reference["q_experts"])
        module.o_experts.weight.copy_(reference["o_experts"] / module.output_scale)
        module.k_proj.weight.copy_(reference["k_proj"])
        module.v_proj.weight.copy_(reference["v_proj"])
    return module


def by_expert(tensor, indices, dim):
    """Reorder the K slots of `tensor` along `dim` by expert, so that ranks do not matter."""
    order = indices.argsort(dim=-1)  # [B, T, K]
    moved = tensor.movedim(dim, 2)  # [B, T, K, ...]
    for _ in range(moved.dim() - 3):
        order = order.unsqueeze(-1)
    return moved.gather(2, order.expand_as(moved))


@pytest.mark.parametrize("path", reference_files(), ids=lambda path: path.stem)
def test_matches_the_authors_code(path):
    reference = load(path)
    module = build(reference)
    query = reference["query"].clone().requires_grad_()
    cross = "grad_key" in reference
    key = reference["key"].clone().requires_grad_() if cross else query
    padding = reference["query_padding_mask"]
    length = query.shape[0]
    causal = (
        torch.full((length, length), float("-inf")).triu(1) if reference.get("causal") else None
    )

    with record_routings(module) as recorded:
        output, weights = module(
            query,
            key,
            key,
            key_padding_mask=reference["key_padding_mask"],
            attn_mask=causal,
            need_head_weights=True,
            query_padding_mask=padding,
        )
    routing = recorded[0].routing
    torch.testing.assert_close(output, reference["output"], **TOLERANCE)

    # Routing, expert by expert; the reference gives padding a probability of zero.
    ours, theirs = routing.indices[~padding], reference["expert_index"][~padding]
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
    probabilities = routing.probabilities.gather(-1, routing.indices)
    torch.testing.assert_close(
        by_expert(probabilities, routing.indices, 2)[~padding],
        by_expert(reference["expert_prob"], reference["expert_index"], 2)[~padding],
        **TOLERANCE,
    )
    torch.testing.assert_close(
        by_expert(weights.permute(1, 2, 0, 3), routing.indices, 2)[~padding],
        by_expert(reference["head_weights"].permute(1, 2, 0, 3), reference["expert_index"], 2)[
            ~padding
        ],
        **TOLERANCE,
    )

    switch = load_balancing_loss(routing, padding)
    cv_squared = cv_squared_loss(routing, padding)
    z_with_padding = router_z_loss(routing)
    for ours, name in (
        (switch, "switch_loss"),
        (cv_squared, "cv_loss"),
        (z_with_padding, "z_loss_with_padding"),
        (router_z_loss(routing, padding), "z_loss_without_padding"),
    ):
        torch.testing.assert_close(ours.item(), reference[name], **TOLERANCE)

    auxiliary = (
        reference["weight_switch"] * switch
        + reference["weight_z"] * z_with_padding
        + reference["weight_cv"] * cv_squared
    )
    torch.testing.assert_close(auxiliary.item(), reference["aux_loss"], **TOLERANCE)

    ((output * reference["grad_output"]).sum() + auxiliary).backward()
    gradients = {
        "query": query.grad,
        "gate": module.router.weight.grad,
        "q_experts": module.q_experts.weight.grad,
        "o_experts": module.o_experts.weight.grad / module.output_scale,
        "k_proj": module.k_proj.weight.grad,
        "v_proj": module.v_proj.weight.grad,
    }
    if cross:
        gradients["key"] = key.grad
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, reference[f"grad_{name}"], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
