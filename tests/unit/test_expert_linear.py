from __future__ import annotations

import pytest
import torch

from moa_fairseq.modules.expert_linear import ExpertLinear, dispatch


def slow_projection(linear, tokens, indices, padding):
    """One small product for each (token, expert) pair."""
    rows = []
    for token, experts, skip in zip(tokens, indices, padding):
        row = []
        for expert in experts:
            output = token @ linear.weight[expert]
            if linear.bias is not None:
                output = output + linear.bias[expert]
            row.append(output * 0 if skip else output)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def slow_combination(linear, heads, gates, indices, padding):
    rows = []
    for k_heads, k_gates, experts, skip in zip(heads, gates, indices, padding):
        total = 0
        for head, gate, expert in zip(k_heads, k_gates, experts):
            output = head @ linear.weight[expert]
            if linear.bias is not None:
                output = output + linear.bias[expert]
            total = total + gate * output
        rows.append(total * 0 if skip else total)
    return torch.stack(rows)


# tokens, experts, selected, in, out: one token, idle experts, odd sizes, K = E, K = 1.
SHAPES = [(9, 5, 2, 4, 3), (1, 7, 3, 5, 2), (6, 3, 3, 4, 5), (8, 16, 1, 3, 7), (1, 1, 1, 2, 2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_slow_reference_with_every_gradient(shape, masked, bias):
    num_tokens, num_experts, num_selected, width_in, width_out = shape
    torch.manual_seed(0)
    into = ExpertLinear(num_experts, width_in, width_out, bias, init_std=1.0).double()
    out = ExpertLinear(num_experts, width_out, width_in, bias, init_std=1.0).double()
    if bias:
        torch.nn.init.normal_(into.bias)
        torch.nn.init.normal_(out.bias)
    tokens = torch.randn(num_tokens, width_in, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(num_tokens, num_selected, dtype=torch.float64, requires_grad=True)
    indices = torch.rand(num_tokens, num_experts).topk(num_selected).indices
    if num_selected == num_experts:
        indices = torch.arange(num_experts).expand(num_tokens, -1)
    # With K = E the caller's gates of zero do what leaving padding out does elsewhere.
    padding = torch.rand(num_tokens) < 0.4
    if not masked or num_selected == num_experts:
        padding = torch.zeros(num_tokens, dtype=torch.bool)

    plan = dispatch(indices, num_experts, padding)
    heads = into.project_tokens(tokens, plan)
    output = out.combine_heads(heads, gates, plan)
    slow_heads = slow_projection(into, tokens, indices, padding)
    slow_output = slow_combination(out, slow_heads, gates, indices, padding)
    torch.testing.assert_close(heads, slow_heads)
    torch.testing.assert_close(output, slow_output)

    leaves = [tokens, gates, *into.parameters(), *out.parameters()]
    weight = torch.randn_like(output)
    fast = torch.autograd.grad((output * weight).sum(), leaves)
    slow = torch.autograd.grad((slow_output * weight).sum(), leaves)
    for ours, expected in zip(fast, slow):
        torch.testing.assert_close(ours, expected)


def test_idle_expert_has_a_gradient_of_zero_not_none():
    linear = ExpertLinear(4, 3, 2, bias=True)
    plan = dispatch(torch.tensor([[0, 2], [2, 0]]), 4)
    linear.project_tokens(torch.randn(2, 3), plan).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad[[1, 3]].abs().max() == 0
    assert linear.weight.grad[[0, 2]].abs().min() > 0
    assert linear.bias.grad[[1, 3]].abs().max() == 0


def test_nothing_but_padding_is_zero():
    linear = ExpertLinear(4, 3, 2)
    plan = dispatch(torch.tensor([[0, 2], [2, 0]]), 4, torch.tensor([True, True]))
    assert linear.project_tokens(torch.randn(2, 3), plan).abs().max() == 0


def test_quantization_noise_drops_whole_blocks_in_training_only():
    linear = ExpertLinear(3, 16, 40, quant_noise=0.25, quant_noise_block_size=4, init_std=1.0)
    torch.manual_seed(0)
    noisy = linear._weight()
    blocks = noisy.view(3, 4, 4, 40)
    dropped = blocks == 0
    assert torch.equal(dropped.any(2), dropped.all(2))
    assert 0.18 < dropped.float().mean() < 0.32
    kept = ~dropped.view_as(noisy)
    torch.testing.assert_close(noisy[kept], linear.weight[kept] / 0.75)
    linear.eval()
    assert torch.equal(linear._weight(), linear.weight)


def test_quantization_block_that_does_not_fit_names_the_flag():
    with pytest.raises(ValueError, match="--quant-noise-pq-block-size 8"):
        ExpertLinear(2, 12, 4, quant_noise=0.1)
