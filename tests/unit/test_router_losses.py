from __future__ import annotations

import math

import pytest
import torch

from moa_fairseq.modules.router_losses import (
    cv_squared_loss,
    expert_counts,
    load_balancing_loss,
    load_coefficient_of_variation,
    router_z_loss,
    routing_entropy,
)
from moa_fairseq.modules.routing import Routing, compute_gates, select_experts


def make_routing(logits, num_selected):
    probabilities = logits.softmax(-1)
    indices = select_experts(probabilities, num_selected)
    return Routing(
        logits, probabilities, indices, compute_gates(logits, probabilities, indices, "detached")
    )


def random_case(seed=0, batch=3, length=5, experts=6, selected=2):
    torch.manual_seed(seed)
    logits = (2 * torch.randn(batch, length, experts)).requires_grad_()
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, 3:] = True
    padding[2, 4:] = True
    return make_routing(logits, selected), padding


def test_losses_equal_their_formulas_token_by_token():
    routing, padding = random_case()
    experts = routing.logits.shape[-1]
    mass, counts, sums, z, entropy, tokens = (
        [0.0] * experts,
        [0] * experts,
        [0.0] * experts,
        0,
        0,
        0,
    )
    for row in range(3):
        for position in range(5):
            if padding[row, position]:
                continue
            logits = routing.logits[row, position].tolist()
            exponentials = [math.exp(x) for x in logits]
            p = [x / sum(exponentials) for x in exponentials]
            tokens += 1
            z += math.log(sum(exponentials)) ** 2
            entropy -= sum(x * math.log(x) for x in p)
            for expert in sorted(range(experts), key=lambda i: -p[i])[:2]:
                counts[expert] += 1
                sums[expert] += p[expert]
            mass = [m + x for m, x in zip(mass, p)]
    balance = experts * sum(f / sum(counts) * m / sum(mass) for f, m in zip(counts, mass))
    shares = [s / sum(sums) for s in sums]
    mean = sum(shares) / experts
    variance = sum((s - mean) ** 2 for s in shares) / (experts - 1)

    assert expert_counts(routing, padding).tolist() == counts
    assert load_balancing_loss(routing, padding).item() == pytest.approx(balance, rel=1e-5)
    assert router_z_loss(routing, padding).item() == pytest.approx(z / tokens, rel=1e-5)
    assert cv_squared_loss(routing, padding).item() == pytest.approx(variance / mean**2, rel=1e-5)
    assert routing_entropy(routing, padding).item() == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss, cv_squared_loss])
def test_padding_counts_for_nothing_in_value_and_gradient(loss):
    routing, padding = random_case()
    value = loss(routing, padding)
    gradient = torch.autograd.grad(value, routing.logits)[0]
    assert gradient[padding].abs().max() == 0

    real = routing.logits.detach()[~padding].unsqueeze(0).requires_grad_()
    alone = loss(make_routing(real, 2))
    torch.testing.assert_close(value, alone)
    torch.testing.assert_close(gradient[~padding], torch.autograd.grad(alone, real)[0][0])


def test_load_balance_is_one_at_uniform_load_and_more_elsewhere():
    uniform = make_routing(torch.eye(4).unsqueeze(0) * 3, 1)
    assert load_balancing_loss(uniform).item() == pytest.approx(1.0)
    crowded = make_routing(torch.tensor([[[3.0, 0, 0, 0]] * 4]), 1)
    assert load_balancing_loss(crowded).item() > 2


def test_load_balance_of_k_equals_e_is_exactly_one_without_gradient():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = load_balancing_loss(make_routing(logits, 4))
    assert loss.item() == 1.0
    assert not loss.requires_grad


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e18])
def test_large_logits_overflow_nothing(scale):
    logits = (scale * torch.randn(2, 3, 4)).requires_grad_()
    routing = make_routing(logits, 2)
    total = load_balancing_loss(routing) + router_z_loss(routing) + cv_squared_loss(routing)
    total.backward()
    assert math.isfinite(total.item())
    assert logits.grad.isfinite().all()


def test_z_loss_is_squared_mean_of_logsumexp():
    logits = torch.log(torch.tensor([[[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]]]))
    expected = (math.log(8) ** 2 + math.log(3) ** 2) / 2
    assert router_z_loss(make_routing(logits, 1)).item() == pytest.approx(expected)


def test_nothing_but_padding_gives_zeros_not_nan():
    routing, _ = random_case()
    padding = torch.ones(3, 5, dtype=torch.bool)
    assert load_balancing_loss(routing, padding).item() == 0
    assert router_z_loss(routing, padding).item() == 0
    assert cv_squared_loss(routing, padding).isfinite()


def test_mask_of_another_shape_is_refused():
    routing, padding = random_case()
    with pytest.raises(ValueError, match=r"\(5, 3\).*\(3, 5\)"):
        load_balancing_loss(routing, padding.T)


def test_coefficient_of_variation_by_hand():
    counts = torch.tensor([[4.0, 4.0, 4.0, 4.0], [8.0, 0.0, 8.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert load_coefficient_of_variation(counts).tolist() == [0.0, 1.0, 0.0]
