from __future__ import annotations

import pytest
import torch

from moa_fairseq.modules.expert_linear import ExpertLinear
from moa_fairseq.modules.expert_products import choose_backend, combine_pairs, dispatch


def slow_projection(linear, tokens, indices):
    """One small product for each (token, expert) pair."""
    rows = []
    for token, experts in zip(tokens, indices):
        row = []
        for expert in experts:
            output = token @ linear.weight[expert]
            row.append(output if linear.bias is None else output + linear.bias[expert])
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
GROUPED = pytest.param(
    "grouped",
    marks=pytest.mark.skipif(
        not hasattr(torch.nn.functional, "grouped_mm"), reason="torch before 2.10 has none"
    ),
)
# torch's grouped product has neither odd sizes nor float64.
CASES = [
    *((backend, torch.float64, shape) for backend in ("dense", "loop", "auto") for shape in SHAPES),
    *(
        pytest.param("grouped", torch.float32, (*s[:3], 8 * s[3], 8 * s[4]), marks=GROUPED.marks)
        for s in SHAPES
    ),
    # Gradients on: few tokens, and more of them than features.
    *((backend, torch.float64, (40, 4, 2, 8, 16)) for backend in ("dense", "loop")),
    pytest.param("grouped", torch.float32, (40, 4, 2, 8, 16), marks=GROUPED.marks),
]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("backend", "dtype", "shape"), CASES, ids=str)
def test_equals_the_slow_reference_with_every_gradient(backend, dtype, shape, masked, bias, gated):
    num_tokens, num_experts, num_selected, width_in, width_out = shape
    torch.manual_seed(0)
    into = ExpertLinear(num_experts, width_in, width_out, bias, init_std=1.0).to(dtype)
    out = ExpertLinear(num_experts, width_out, width_in, bias, init_std=1.0).to(dtype)
    if bias:
        torch.nn.init.normal_(into.bias)
        torch.nn.init.normal_(out.bias)
    tokens = torch.randn(num_tokens, width_in, dtype=dtype, requires_grad=True)
    gates = torch.rand(num_tokens, num_selected, dtype=dtype, requires_grad=True)
    indices = torch.rand(num_tokens, num_experts).topk(num_selected).indices
    if num_selected == num_experts:
        indices = torch.arange(num_experts).expand(num_tokens, -1)
    padding = torch.rand(num_tokens) < 0.4
    if not masked:
        padding = torch.zeros(num_tokens, dtype=torch.bool)

    def fast():
        chosen = choose_backend(backend, num_selected, num_experts, tokens, [width_in, width_out])
        plan = dispatch(indices, num_experts, padding, chosen)
        heads = into.project_tokens(tokens, plan)
        open_gates = gates.masked_fill(padding.unsqueeze(-1), 0)
        scaled = heads * open_gates.unsqueeze(-1) if gated else heads
        return heads, out.combine_heads(scaled, open_gates, plan, gated=gated)

    exactness = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    heads, output = fast()
    slow_heads = slow_projection(into, tokens, indices)
    slow_output = slow_combination(out, slow_heads, gates, indices, padding)
    torch.testing.assert_close(heads[~padding], slow_heads[~padding], **exactness)
    torch.testing.assert_close(output, slow_output, **exactness)
    assert not output[padding].any()

    leaves = [tokens, gates, *into.parameters(), *out.parameters()]
    weight = torch.randn_like(output)
    ours = torch.autograd.grad((output * weight).sum(), leaves)
    slow = torch.autograd.grad((slow_output * weight).sum(), leaves)
    for gradient, expected in zip(ours, slow):
        torch.testing.assert_close(gradient, expected, **exactness)
    with torch.no_grad():
        heads, output = fast()
    torch.testing.assert_close(heads[~padding], slow_heads[~padding].detach(), **exactness)
    torch.testing.assert_close(output, slow_output.detach(), **exactness)


@pytest.mark.parametrize("backend", ["loop", GROUPED])
def test_sums_in_half_precision_are_as_exact_as_one_rounding(backend):
    # 64 experts add up: in bfloat16 alone the error would grow with each of them.
    torch.manual_seed(0)
    linear = ExpertLinear(128, 8, 8, init_std=1.0)
    heads, gates = torch.randn(50, 64, 8), torch.rand(50, 64)
    indices = torch.rand(50, 128).topk(64).indices
    exact = {}
    for dtype in (torch.float32, torch.bfloat16):
        plan = dispatch(indices, 128, None, backend)
        # The same numbers in both types, those that bfloat16 can hold.
        rounded = linear.weight.data.bfloat16().to(dtype)
        scaled = (heads.bfloat16() * gates.bfloat16().unsqueeze(-1)).to(dtype)
        exact[dtype] = combine_pairs(scaled, None, rounded, plan).float()
    error = exact[torch.bfloat16] - exact[torch.float32]
    assert error.abs().max() < 0.05 * exact[torch.float32].std()


@pytest.mark.parametrize("backend", ["dense", "loop", GROUPED])
def test_idle_expert_has_a_gradient_of_zero_not_none(backend):
    linear = ExpertLinear(4, 8, 8, bias=True)
    plan = dispatch(torch.tensor([[0, 2], [2, 0]]), 4, None, backend)
    linear.project_tokens(torch.randn(2, 8), plan).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad[[1, 3]].abs().max() == 0
    assert linear.weight.grad[[0, 2]].abs().min() > 0
    assert linear.bias.grad[[1, 3]].abs().max() == 0


@pytest.mark.parametrize("backend", ["dense", "loop", GROUPED])
def test_nothing_but_padding_is_zero(backend):
    linear = ExpertLinear(4, 8, 8)
    plan = dispatch(torch.tensor([[0, 2], [2, 0]]), 4, torch.tensor([True, True]), backend)
    heads = linear.project_tokens(torch.randn(2, 8), plan)
    output = linear.combine_heads(heads, torch.zeros(2, 2), plan)
    assert not output.any()
    output.sum().backward()
    assert not linear.weight.grad.any()


@pytest.mark.parametrize("backend", ["dense", "loop", GROUPED])
def test_autocast_multiplies_in_its_type_and_gives_gradients_in_ours(backend):
    torch.manual_seed(0)
    linear = ExpertLinear(4, 8, 8, init_std=1.0)
    tokens = torch.randn(6, 8, requires_grad=True)
    plan = dispatch(torch.rand(6, 4).topk(2).indices, 4, None, backend)
    expected = linear.project_tokens(tokens, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heads = linear.project_tokens(tokens, plan)
        output = linear.combine_heads(heads, torch.rand(6, 2, requires_grad=True), plan)
    assert heads.dtype == output.dtype == torch.bfloat16
    torch.testing.assert_close(heads.float(), expected, atol=0.1, rtol=0.05)
    output.sum().backward()
    assert tokens.grad.dtype == linear.weight.grad.dtype == torch.float32
    assert tokens.grad.isfinite().all()


CHOICES = [
    (("auto", 4, 4, torch.float32, [8, 8]), "dense"),
    (("auto", 2, 4, torch.float32, [8, 8]), "loop"),
    (("loop", 4, 4, torch.float32, [8, 8]), "loop"),
    pytest.param(("grouped", 2, 4, torch.bfloat16, [16, 8]), "grouped", marks=GROUPED.marks),
]


@pytest.mark.parametrize(("arguments", "expected"), CHOICES, ids=str)
def test_the_backend_follows_from_k_e_and_device(arguments, expected):
    wanted, selected, experts, dtype, widths = arguments
    tokens = torch.zeros(1, dtype=dtype)
    assert choose_backend(wanted, selected, experts, tokens, widths) == expected


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch before 2.10")
def test_a_device_other_than_the_cpu_is_never_waited_for():
    tokens = torch.zeros(1, device="meta")
    assert choose_backend("auto", 2, 4, tokens, [8, 8]) == "grouped"
    # Where torch's grouped product does not fit, there is nothing else to do.
    assert choose_backend("auto", 2, 4, tokens, [8, 12]) == "loop"


@pytest.mark.parametrize(("dtype", "widths"), [(torch.float64, [8, 8]), (torch.float32, [8, 12])])
def test_a_grouped_product_that_torch_does_not_have_names_the_flag(dtype, widths):
    with pytest.raises(ValueError, match=r"--expert-backend grouped .* use --expert-backend loop"):
        choose_backend("grouped", 2, 4, torch.zeros(1, dtype=dtype), widths)


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
