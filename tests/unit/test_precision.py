"""What the CPU can compute of half precision, and what a broken router is said to have."""

from __future__ import annotations

import math

import pytest
import torch

from moa_fairseq.modules.routing import Router
from moa_fairseq.router_watch import describe, extent

from ..toy import half_precision, toy_model, toy_sample, toy_task
from .test_criterion import build

HALVES = [torch.float16, torch.bfloat16]
OPTIONS = [
    {},
    {"heads_per_expert": 2, "num_experts": 2},
    {"ffn_type": "moe"},
    {"projection_bias": True, "router_noise": True, "sample_topk": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_model_in_half_precision_has_finite_gradients_everywhere(dtype, options):
    task = toy_task()
    # Padding on both sides, and with it the masks of padding and of the future.
    sample = toy_sample(task, [3, 6], [4, 2], extra_padding=2)
    model = toy_model(task, **options).to(half_precision(dtype)).train()
    loss, _, logged = build(task, alpha=1.0, beta=1.0)(model, sample)
    loss.backward()
    assert loss.isfinite()
    assert logged["router_loss"].dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == dtype, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_computes_what_float32_does(dtype):
    task = toy_task()
    sample = toy_sample(task, [3, 6], [4, 2], extra_padding=2)
    # K = E: where experts are selected, rounding can select others.
    model = toy_model(task, num_experts=2)
    expected, _, _ = build(task)(model, sample)
    with torch.autocast("cpu", dtype=half_precision(dtype)):
        mixed, _, _ = build(task)(model, sample)
    half, _, _ = build(task)(model.to(dtype), sample)
    assert float(mixed.detach()) == pytest.approx(float(expected.detach()), rel=0.02)
    assert float(half.detach()) == pytest.approx(float(expected.detach()), rel=0.02)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_largest_numbers_of_half_precision_do_not_overflow_in_the_router(dtype):
    router = Router(64, 8, 2).to(dtype)
    largest = 60000.0  # of float16; their squares and sums are not
    tokens = torch.full((5, 64), largest, dtype=dtype)
    with torch.no_grad():
        router.weight.fill_(1.0)
    routing = router(tokens)
    assert routing.logits.dtype == torch.float32
    expected = 64 * float(tokens[0, 0])
    torch.testing.assert_close(routing.logits, torch.full((5, 8), expected))
    assert routing.gates.isfinite().all()


def test_extent_counts_what_is_not_finite():
    values = torch.tensor([1.0, -2.0, math.nan, math.inf, -math.inf, 5.0])
    assert extent(values) == (-2.0, 5.0, 1, 2, 6)
    assert str(extent(values)) == "-2 to 5, 1 NaN and 2 infinite of 6"
    assert str(extent(values[:2].half())) == "-2 to 1"
    assert str(extent(values[2:3])) == "nan to nan, 1 NaN and 0 infinite of 1"


@pytest.mark.parametrize(
    ("tokens", "weight", "advice"),
    [
        (1.0, math.inf, "weights are broken already"),
        (math.inf, 1.0, "what goes in is not finite already"),
        (1e30, 1e30, "higher --router-z-weight"),
    ],
)
def test_the_advice_follows_where_it_began(tokens, weight, advice):
    source, weights = torch.full((3, 4), tokens), torch.full((4, 2), weight)
    line = describe("decoder.layers.1.encoder_attn", source, source @ weights, weights)
    assert line.startswith("the router of decoder.layers.1.encoder_attn has logits")
    assert advice in line
    assert "0 NaN and 6 infinite of 6" in line
    assert "\n" not in line
