from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from fairseq.modules import MultiheadAttention

from moa_fairseq.modules.moa_attention import (
    CROSS,
    DECODER_SELF,
    ENCODER_SELF,
    MixtureOfAttentionHeads,
)
from moa_fairseq.modules.recording import record_routings

from ..toy import half_precision

OPTIONS = {
    "one head an expert": {},
    "three heads an expert": {"heads_per_expert": 3},
    "biases": {"bias": True, "heads_per_expert": 2},
    "all experts": {"num_selected": 5},
    "one expert a token": {"num_selected": 1},
    "plain gates": {"gate_normalization": "none"},
    "softmax gates": {"gate_normalization": "topk-softmax"},
}


def build(kind=ENCODER_SELF, seed=0, embed_dim=6, num_experts=5, head_dim=4, **options):
    torch.manual_seed(seed)
    module = MixtureOfAttentionHeads(
        embed_dim,
        options.pop("num_selected", 2),
        num_experts,
        head_dim,
        kind=kind,
        router_init_std=1.0,
        **options,
    )
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module


def causal_mask(length):
    return torch.full((length, length), float("-inf")).triu(1)


def slow_attention(module, query, key, padding=None, causal=False):
    """Equations 1 to 4, one token, one expert and one head at a time."""
    target_length, batch, dim = query.shape
    heads, head_dim = module.heads_per_expert, module.head_dim
    routing = module.router(query.transpose(0, 1))
    outputs = torch.zeros_like(query)
    for row in range(batch):
        for position in range(target_length):
            visible = [
                s
                for s in range(key.shape[0])
                if not (padding is not None and padding[row, s]) and not (causal and s > position)
            ]
            keys = module.k_proj(key[visible, row]).view(-1, heads, head_dim)
            values = module.v_proj(key[visible, row]).view(-1, heads, head_dim)
            total = torch.zeros(dim, dtype=query.dtype)
            for expert, gate in zip(routing.indices[row, position], routing.gates[row, position]):
                q = query[position, row] @ module.q_experts.weight[expert]
                if module.q_experts.bias is not None:
                    q = q + module.q_experts.bias[expert]
                q = q.view(heads, head_dim)
                head_outputs = []
                for head in range(heads):
                    scores = keys[:, head] @ q[head] / head_dim**0.5
                    head_outputs.append(scores.softmax(0) @ values[:, head])
                output = torch.cat(head_outputs) @ module.o_experts.weight[expert]
                if module.o_experts.bias is not None:
                    output = output + module.o_experts.bias[expert]
                # W_i^o, and its bias, are stored divided by the scale.
                total = total + gate.to(output.dtype) * module.output_scale * output
            outputs[position, row] = total
    return outputs


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_equations_token_by_token(name):
    module = build(**OPTIONS[name])
    query = torch.randn(4, 3, 6)
    padding = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    output, _ = module(query, query, query, key_padding_mask=padding)
    expected = slow_attention(module, query, query, padding)
    expected[padding.T] = 0
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_causal_and_cross_attention_equal_the_equations(name):
    module = build(DECODER_SELF, **OPTIONS[name])
    query = torch.randn(4, 2, 6)
    output, _ = module(query, query, query, attn_mask=causal_mask(4))
    torch.testing.assert_close(
        output, slow_attention(module, query, query, causal=True), atol=1e-5, rtol=1e-4
    )
    cross = build(CROSS, key_dim=7, **OPTIONS[name])
    memory = torch.randn(5, 2, 7)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
    output, _ = cross(query, memory, memory, key_padding_mask=padding, static_kv=True)
    torch.testing.assert_close(
        output, slow_attention(cross, query, memory, padding), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_step_by_step_equals_the_full_pass(name):
    module = build(DECODER_SELF, **OPTIONS[name]).eval()
    query = torch.randn(5, 3, 6)
    full, _ = module(query, query, query, attn_mask=causal_mask(5))
    state = {}
    steps = [module(step, step, step, incremental_state=state)[0] for step in query.split(1, dim=0)]
    torch.testing.assert_close(torch.cat(steps), full, atol=1e-6, rtol=1e-5)
    buffer = module._get_input_buffer(state)
    heads = OPTIONS[name].get("heads_per_expert", 1)
    assert buffer["prev_key"].shape == buffer["prev_value"].shape == (3, heads, 5, 4)


def test_cross_attention_step_by_step_reads_keys_once():
    module = build(CROSS, heads_per_expert=2).eval()
    query, memory = torch.randn(4, 3, 6), torch.randn(5, 3, 6)
    padding = torch.tensor([[0] * 5, [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
    full, _ = module(query, memory, memory, key_padding_mask=padding, static_kv=True)
    state, steps = {}, []
    for number, step in enumerate(query.split(1, dim=0)):
        keys = memory if number == 0 else None  # after the first step the cache has them
        output, _ = module(
            step,
            keys,
            keys,
            key_padding_mask=padding if number == 0 else None,
            incremental_state=state,
            static_kv=True,
        )
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps), full, atol=1e-6, rtol=1e-5)


def test_padded_prefix_step_by_step_equals_the_full_pass():
    module = build(DECODER_SELF).eval()
    query = torch.randn(4, 2, 6)
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    full, _ = module(query, query, query, key_padding_mask=padding, attn_mask=causal_mask(4))
    state = {}
    for position in range(4):
        step = query[position : position + 1]
        mask = padding[:, position : position + 1]
        output, _ = module(
            step,
            step,
            step,
            key_padding_mask=mask if mask.any() else None,
            incremental_state=state,
        )
        torch.testing.assert_close(output[0], full[position], atol=1e-6, rtol=1e-5)


def test_reordering_the_beam_equals_reindexing_the_batch():
    module = build(DECODER_SELF, heads_per_expert=2).eval()
    query = torch.randn(4, 3, 6)
    order = torch.tensor([2, 0, 0, 1])
    state, expected_state = {}, {}
    for step in query[:3].split(1, dim=0):
        module(step, step, step, incremental_state=state)
        step = step[:, order]
        module(step, step, step, incremental_state=expected_state)
    module.reorder_incremental_state(state, order)
    last = query[3:, order]
    output, _ = module(last, last, last, incremental_state=state)
    expected, _ = module(last, last, last, incremental_state=expected_state)
    torch.testing.assert_close(output, expected)


def test_output_depends_on_neither_batch_nor_padding():
    module = build().eval()
    sentences = [torch.randn(length, 1, 6) for length in (3, 5, 1)]
    batch, padding = torch.zeros(7, 3, 6), torch.ones(3, 7, dtype=torch.bool)
    for row, sentence in enumerate(sentences):
        batch[: len(sentence), row : row + 1] = sentence
        padding[row, : len(sentence)] = False
    output, _ = module(batch, batch, batch, key_padding_mask=padding)
    for row, sentence in enumerate(sentences):
        alone, _ = module(sentence, sentence, sentence)
        torch.testing.assert_close(output[: len(sentence), row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_but_padding_is_zero_not_nan(dtype):
    module = build(CROSS).to(dtype)
    query = torch.randn(2, 2, 6, dtype=dtype, requires_grad=True)
    memory = torch.randn(3, 2, 6, dtype=dtype)
    padding = torch.tensor([[True, True, True], [False, False, True]])
    output, _ = module(query, memory, memory, key_padding_mask=padding)
    assert output[:, 0].abs().max() == 0
    assert output[:, 1].abs().min() > 0
    output.sum().backward()
    assert query.grad.isfinite().all()


def test_weights_are_distributions_over_real_keys():
    module = build(CROSS, heads_per_expert=2)
    query, memory = torch.randn(4, 2, 6), torch.randn(5, 2, 6)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    arguments = {"key_padding_mask": padding, "static_kv": True}
    _, by_head = module(query, memory, memory, need_head_weights=True, **arguments)
    _, mean = module(query, memory, memory, need_weights=True, **arguments)
    _, none = module(query, memory, memory, need_weights=False, **arguments)
    assert by_head.shape == (4, 2, 4, 5)
    torch.testing.assert_close(by_head.sum(-1), torch.ones(4, 2, 4))
    assert by_head[:, 1, :, 3:].max() == 0
    torch.testing.assert_close(by_head.mean(0), mean)
    assert none is None


def test_dropout_acts_on_attention_weights_in_training_only():
    module = build(dropout=0.5)
    query = torch.randn(6, 2, 6)
    first, second = (module(query, query, query)[0] for _ in range(2))
    assert not torch.equal(first, second)
    module.eval()
    first, second = (module(query, query, query)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, slow_attention(module, query, query), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("selected,experts,head_dim", [(8, 8, 128), (8, 32, 128), (16, 32, 256)])
@pytest.mark.parametrize("normalization", ["detached", "none"])
def test_fresh_output_has_the_size_of_fairseqs_attention(
    selected, experts, head_dim, normalization
):
    torch.manual_seed(0)
    query = torch.randn(20, 8, 512)
    stock = MultiheadAttention(512, 8, self_attention=True)
    module = MixtureOfAttentionHeads(
        512,
        selected,
        experts,
        head_dim,
        gate_normalization=normalization,
        output_init_gain=1.0,
    )
    with torch.no_grad():
        expected = stock(query, query, query)[0].std()
        ratio = module(query, query, query)[0].std() / expected
    # The selected of plain gates are larger than the 1/E that the initialisation reckons with.
    assert 0.75 < ratio < (1.8 if normalization == "none" else 1.3)


def test_copies_pickles_and_saves_after_a_forward_pass():
    module = build(DECODER_SELF)
    query = torch.randn(3, 2, 6)
    output, _ = module(query, query, query)
    output.sum().backward()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(twin(query, query, query)[0], output)


def test_a_forward_pass_leaves_nothing_on_the_module():
    module = build()
    before = set(vars(module)) | set(vars(module.router))
    query = torch.randn(3, 2, 6)
    with record_routings(module):
        module(query, query, query)
    assert set(vars(module)) | set(vars(module.router)) == before
    assert not module.router._forward_hooks


def test_half_precision_masks_are_finite():
    module = build(DECODER_SELF).to(half_precision(torch.float16))
    query = torch.randn(4, 2, 6, dtype=torch.float16)
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    output, weights = module(
        query, query, query, key_padding_mask=padding, attn_mask=causal_mask(4).half()
    )
    assert output.isfinite().all()
    assert weights.isfinite().all()
