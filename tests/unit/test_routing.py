from __future__ import annotations

import pytest
import torch

from moa_fairseq.modules.routing import Router, compute_gates, select_experts


def route(tokens, **options):
    torch.manual_seed(1)
    router = Router(tokens.shape[-1], 6, 3, init_std=0.7, **options)
    return router, router(tokens)


def test_selects_the_largest_probabilities_in_falling_order():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.05, 0.2, 0.05]])
    assert select_experts(probabilities, 2).tolist() == [[1, 3], [0, 2]]


def test_k_equals_e_takes_all_experts_in_their_own_order():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert select_experts(probabilities, 4).tolist() == [[0, 1, 2, 3]]


def test_detached_gates_sum_to_one_and_teach_unselected_experts():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    probabilities = logits.softmax(-1)
    indices = select_experts(probabilities, 3)
    gates = compute_gates(logits, probabilities, indices, "detached")
    torch.testing.assert_close(gates.sum(-1), torch.ones(5, dtype=torch.float64))
    (gates * torch.rand_like(gates)).sum().backward()
    unselected = torch.ones(5, 6, dtype=torch.bool).scatter(1, indices, False)
    assert logits.grad[unselected].abs().min() > 0


def test_topk_softmax_gates_sum_to_one_and_teach_selected_experts_only():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    indices = select_experts(logits.softmax(-1), 3)
    gates = compute_gates(logits, logits.softmax(-1), indices, "topk-softmax")
    for token in range(5):
        chosen = logits[token, indices[token]]
        torch.testing.assert_close(gates[token], chosen.exp() / chosen.exp().sum())
    (gates * torch.rand_like(gates)).sum().backward()
    unselected = torch.ones(5, 6, dtype=torch.bool).scatter(1, indices, False)
    assert logits.grad[unselected].abs().max() == 0


def test_gates_without_normalization_are_the_probabilities():
    _, routing = route(torch.randn(7, 5), gate_normalization="none")
    expected = routing.probabilities.gather(-1, routing.indices)
    assert torch.equal(routing.gates, expected)


def test_unknown_normalization_names_the_choices():
    with pytest.raises(ValueError, match="detached, none, topk-softmax"):
        compute_gates(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 1, dtype=int), "sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routes_in_float32_whatever_the_precision(dtype):
    tokens = torch.randn(50, 16).to(dtype)
    router = Router(16, 6, 3, init_std=0.7).to(dtype)
    expected = tokens.float() @ router.weight.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(tokens)
    assert routing.logits.dtype == routing.gates.dtype == torch.float32
    torch.testing.assert_close(routing.logits, expected)


def test_noise_changes_training_only():
    tokens = torch.randn(40, 5)
    router, first = route(tokens, noise=True)
    second = router(tokens)
    # At the start the noise weights are zero, so the deviation is softplus(0) + 0.01.
    difference = (first.logits - second.logits) / (2**0.5 * 0.7031)
    assert 0.8 < difference.std() < 1.2
    router.eval()
    assert torch.equal(router(tokens).logits, tokens @ router.weight)


def test_sampled_experts_follow_the_probabilities_that_are_left():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).repeat(20000, 1)
    torch.manual_seed(0)
    chosen = select_experts(probabilities, 2, num_sampled=1)
    assert (chosen[:, 0] == 0).all()
    shares = chosen[:, 1].bincount(minlength=5) / 20000
    torch.testing.assert_close(
        shares, torch.tensor([0.0, 3 / 6, 2 / 6, 1 / 6, 0.0]), atol=0.02, rtol=0
    )


def test_sampling_never_repeats_an_expert_and_stops_in_evaluation():
    tokens = torch.randn(500, 5)
    router, routing = route(tokens, sample_topk=3)
    assert (routing.indices.sort(-1).values.diff(dim=-1) > 0).all()
    router.eval()
    assert torch.equal(router(tokens).indices, router(tokens).logits.topk(3).indices)


def test_sampling_survives_probabilities_that_underflow():
    probabilities = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    drawn = select_experts(probabilities, 3, num_sampled=2)
    assert drawn[0, 0] == 0
    assert drawn.unique().numel() == 3


def test_fresh_router_does_not_send_every_token_to_the_same_experts():
    router = Router(64, 8, 2)
    chosen = router(torch.randn(1000, 64)).indices.unique()
    assert chosen.numel() == 8
