"""The ways in which attention is computed, against each other."""

from __future__ import annotations

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from moa_fairseq.modules import attention_products, moa_attention
from moa_fairseq.modules.absorbed_projections import absorb, attend_absorbed, worth_absorbing
from moa_fairseq.modules.attention_products import attend, attend_fused, merge_masks
from moa_fairseq.modules.moa_attention import CROSS, MixtureOfAttentionHeads
from moa_fairseq.modules.shared_keys import is_identity

from ..slow_attention import slow_attention
from ..toy import toy_model, toy_sample, toy_task

needs_fused = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"), reason="needs torch 2.0"
)


def masks(kind):
    """`attn_mask` `[T, S]` and `key_padding_mask` `[batch, S]` for 4 queries and 6 keys."""
    causal = torch.full((4, 6), float("-inf")).triu(3) if "causal" in kind else None
    padding = None
    if "padding" in kind:
        padding = torch.arange(6).expand(3, -1) >= torch.tensor([[6], [4], [0]])  # one sees nothing
    return causal, padding


@needs_fused
@pytest.mark.parametrize("kind", ["nothing hidden", "causal", "padding", "causal and padding"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_attention_equals_two_products_with_every_gradient(kind, dtype):
    torch.manual_seed(1)
    causal, padding = masks(kind)
    tensors = [torch.randn(3, 4, 2, 10), torch.randn(3, 2, 6, 5), torch.randn(3, 2, 6, 5)]
    mask = merge_masks(causal, padding, 2, 3)
    found = []
    for compute in (
        lambda *given: attend(*given, mask, torch.nn.Identity())[0],
        lambda *given: attend_fused(*given, mask, 0.0),
    ):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        values = inputs[2]
        if padding is not None:
            values = values.masked_fill(padding[:, None, :, None], 0.0)
        heads = compute(*inputs[:2], values)
        weighted = (heads * torch.linspace(-1, 1, 10).to(dtype)).sum()
        found.append((heads, *torch.autograd.grad(weighted, inputs)))
    tolerance = (
        {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float64 else {"atol": 0.1, "rtol": 0.05}
    )
    for ours, expected in zip(found[1], found[0]):
        torch.testing.assert_close(ours, expected, **tolerance)
    if "padding" in kind:
        assert not found[1][0][2].any()  # who sees nothing but padding gets zero


@needs_fused
@pytest.mark.parametrize("experts", [2, 4], ids=["all experts", "two of four"])
def test_a_module_with_fused_attention_equals_one_without(experts, monkeypatch):
    torch.manual_seed(2)
    module = MixtureOfAttentionHeads(8, 2, experts, 6, heads_per_expert=2, router_init_std=0.5)
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool()
    found = []
    calls = []

    def counting(*given):
        calls.append(1)
        return attend_fused(*given)

    monkeypatch.setattr(moa_attention, "attend_fused", counting)
    for threshold in (10**6, 1):
        monkeypatch.setattr(attention_products, "FUSED_FROM", threshold)
        torch.manual_seed(3)
        tokens = torch.randn(4, 2, 8, requires_grad=True)
        output, weights = module(tokens, tokens, tokens, padding, need_weights=False)
        assert weights is None
        module.zero_grad()
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        found.append((output, tokens.grad, *gradients))
    assert len(calls) == 1
    for ours, expected in zip(found[1], found[0]):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    _, weights = module(tokens, tokens, tokens, padding)
    assert weights.shape == (2, 4, 4)  # who asks for weights gets them, from the other way


@pytest.mark.parametrize("bias", [False, True])
def test_absorbed_projections_equal_the_equations(bias):
    torch.manual_seed(4)
    module = MixtureOfAttentionHeads(7, 3, 3, 5, kind=CROSS, bias=bias, router_init_std=0.7).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    sentences, hypotheses, length = 2, 4, 6
    memory = torch.randn(length, sentences, 7)
    padding = torch.tensor([[0] * 6, [0, 0, 0, 0, 1, 1]]).bool()
    tokens = torch.randn(1, sentences * hypotheses, 7)
    with torch.no_grad():
        keys = module._split_heads(module.k_proj(memory))
        values = module._split_heads(module.v_proj(memory))
        routing = module.router(tokens.transpose(0, 1))
        absorbed = absorb(
            keys, values, module.q_experts.weight, module.o_experts.weight, module.q_experts.bias
        )
        output, weights = attend_absorbed(
            tokens.view(sentences, hypotheses, 7),
            routing.gates.view(sentences, hypotheses, 3) * module.output_scale,
            absorbed,
            padding,
            module.o_experts.bias,
        )
        of_hypothesis = [row // hypotheses for row in range(sentences * hypotheses)]
        expected, expected_weights = slow_attention(
            module,
            tokens,
            memory[:, of_hypothesis],
            routing,
            torch.zeros(sentences * hypotheses, 1, dtype=torch.bool),
            padding[of_hypothesis],
            torch.zeros(1, length, dtype=torch.bool),
        )
    torch.testing.assert_close(output.reshape(1, -1, 7).double(), expected, atol=1e-5, rtol=1e-4)
    ours = weights.reshape(-1, 3, length).transpose(0, 1).unsqueeze(2)  # [E, batch, 1, S]
    torch.testing.assert_close(ours.double(), expected_weights, atol=1e-5, rtol=1e-4)


ALL_EXPERTS = {"num_experts": 2, "head_dim": 24}


def searching(task, **options):
    """A model whose sentences end at different steps."""
    model = toy_model(task, **{**ALL_EXPERTS, **options}).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight[task.target_dictionary.eos()] *= 2
    return model


def absorbing_modules(model, monkeypatch):
    """How many attentions absorbed while :func:`search` ran, as a list that grows."""
    absorbed = []

    def counting(*given):
        absorbed.append(given[0].shape)
        return absorb(*given)

    monkeypatch.setattr(moa_attention, "absorb", counting)
    return absorbed


def search(task, model, sample, beam):
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_b=12)
    return [
        [
            (found["tokens"].tolist(), float(found["score"]), found["attention"])
            for found in sentence
        ]
        for sentence in generator.generate([model], sample)
    ]


@pytest.mark.parametrize(
    "options,lengths",
    [
        ({}, [5]),
        ({}, [6, 2, 5, 7]),
        ({"projection_bias": True}, [6, 2, 5, 7]),
        ({"dropout": 0.5}, [5]),
        ({"num_experts": 5}, [5]),
        ({"num_experts": 5, "projection_bias": True}, [5]),
    ],
    ids=str,
)
def test_beam_search_with_absorbed_projections_changes_nothing(options, lengths, monkeypatch):
    task = toy_task()
    sample = toy_sample(task, lengths, [1] * len(lengths))
    model = searching(task, **options)
    absorbed = absorbing_modules(model, monkeypatch)
    ours = search(task, model, sample, 4)
    assert len(absorbed) == 2  # the cross-attention of each layer, once
    monkeypatch.setattr(moa_attention, "worth_absorbing", lambda *_: False)
    expected = search(task, searching(task, **options), sample, 4)
    assert len(absorbed) == 2
    for sentence, reference in zip(ours, expected):
        assert [found[0] for found in sentence] == [found[0] for found in reference]
        assert [found[1] for found in sentence] == pytest.approx([found[1] for found in reference])
        for found, other in zip(sentence, reference):
            torch.testing.assert_close(found[2], other[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 4},
        {"heads_per_expert": 2, "head_dim": 12},
        {"expert_backend": "loop"},
        {"head_dim": 16},
    ],
    ids=["K < E", "two heads an expert", "another backend", "many keys"],
)
def test_projections_are_absorbed_only_where_that_pays(options, monkeypatch):
    task = toy_task()
    model = searching(task, **options)
    absorbed = absorbing_modules(model, monkeypatch)
    search(task, model, toy_sample(task, [5, 6], [1, 1]), 4)
    assert not absorbed


def test_dropout_during_inference_keeps_acting_on_weights(monkeypatch):
    task = toy_task()
    model = searching(task, attention_dropout=0.5)
    absorbed = absorbing_modules(model, monkeypatch)
    sample = toy_sample(task, [5], [1])
    search(task, model, sample, 4)
    assert len(absorbed) == 2
    for module in model.modules():
        if isinstance(module, MixtureOfAttentionHeads):
            module.dropout_module.apply_during_inference = True  # --retain-dropout
    scores = {search(task, model, sample, 4)[0][0][1] for _ in range(3)}
    assert len(absorbed) == 2
    assert len(scores) == 3


def test_absorbing_is_bounded():
    def worth(sharers, sentences, length, experts=8):
        keys = torch.empty(sentences, 1, length, 128)
        return worth_absorbing(sharers, keys, 8, experts, 512)

    assert worth(5, 16, 30) and worth(2, 1, 96)
    assert not worth(1, 1, 30)  # nothing is shared
    assert not worth(3, 16, 30) and not worth(5, 16, 43) and not worth(5, 1, 97)
    assert not worth(5, 100, 30)  # 47 MiB
    assert worth(5, 1, 42, 32)
    assert not worth(5, 1, 43, 32) and not worth(5, 1, 30, 33) and not worth(5, 2, 30, 32)


def test_an_order_that_changes_nothing():
    assert is_identity(torch.tensor([0, 1, 2]), 3)
    assert not is_identity(torch.tensor([0, 2, 1]), 3)
    assert not is_identity(torch.tensor([0, 1]), 3)  # the last sentence has ended
