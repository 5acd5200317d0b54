from __future__ import annotations

import pytest
import torch

from moa_fairseq.modules.masking import without_experts
from moa_fairseq.modules.moa_attention import MixtureOfAttentionHeads
from moa_fairseq.modules.moe_feed_forward import MixtureOfFeedForwards
from moa_fairseq.modules.recording import record_routings

from ..slow_attention import slow_attention


def attention(num_selected=2, num_experts=5, **options):
    torch.manual_seed(3)
    module = MixtureOfAttentionHeads(
        12, num_selected, num_experts, 4, router_init_std=0.5, **options
    )
    return module.eval()


def tokens(length=6):
    return torch.randn(length, 2, 12, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [3, 9])  # gates go to the weights of keys, or to features
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_experts": 2},
        {"heads_per_expert": 2, "bias": True},
        {"gate_normalization": "none"},
    ],
)
def test_a_masked_expert_is_a_term_left_out(options, length):
    module, x = attention(**options), tokens(length)
    unmasked = torch.zeros(2, length, dtype=torch.bool), torch.zeros(length, length).bool()
    routing = module.router(x.transpose(0, 1))
    for expert in range(module.num_experts):
        gates = routing.gates.clone()
        for sentence in range(2):
            for token in range(length):
                for rank in range(module.num_selected):
                    if routing.indices[sentence, token, rank] == expert:
                        gates[sentence, token, rank] = 0.0
        expected, _ = slow_attention(
            module, x, x, routing._replace(gates=gates), unmasked[0], *unmasked
        )
        with without_experts(module, [expert]):
            output, _ = module(x, x, x)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


def test_others_keep_what_they_have_and_everything_comes_back():
    module, x = attention(), tokens()
    before, _ = module(x, x, x)
    with record_routings(module) as plain:
        module(x, x, x)
    with without_experts(module, [1, 4]), record_routings(module) as masked:
        module(x, x, x)
    assert torch.equal(masked[0].routing.indices, plain[0].routing.indices)
    gone = (plain[0].routing.indices == 1) | (plain[0].routing.indices == 4)
    assert gone.any()
    assert not masked[0].routing.gates[gone].any()
    assert torch.equal(masked[0].routing.gates[~gone], plain[0].routing.gates[~gone])
    with pytest.raises(RuntimeError, match="stop"), without_experts(module, [0]):
        raise RuntimeError("stop")
    assert torch.equal(module(x, x, x)[0], before)


@pytest.mark.parametrize("bias", [False, True])
def test_without_any_expert_nothing_comes_out(bias):
    module, x = attention(bias=bias), tokens()
    with without_experts(module, range(module.num_experts)):
        assert not module(x, x, x)[0].any()


def test_feed_forwards_are_masked_too():
    torch.manual_seed(1)
    module = MixtureOfFeedForwards(12, 8, 2, 4, torch.relu, router_init_std=0.5).eval()
    x = tokens()
    routing = module.router(x.transpose(0, 1))
    whole = module(x)
    for expert in range(4):
        with without_experts(module, [expert]):
            difference = whole - module(x)
        for token in range(6):
            for sentence in range(2):
                row = x[token, sentence]
                hidden = torch.relu(row @ module.in_experts.weight[expert])
                term = hidden @ module.out_experts.weight[expert] * module.output_scale
                gate = sum(
                    float(routing.gates[sentence, token, rank])
                    for rank in range(2)
                    if routing.indices[sentence, token, rank] == expert
                )
                torch.testing.assert_close(
                    difference[token, sentence], gate * term, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("expert", [-1, 5])
def test_an_expert_that_is_not_there_is_refused(expert):
    with (
        pytest.raises(ValueError, match=f"no expert {expert} among 5"),
        without_experts(attention(), [expert]),
    ):
        pass
