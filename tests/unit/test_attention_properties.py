"""MoA attention of any shape, with any masks and options, against a slow implementation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moa_fairseq.modules.moa_attention import ATTENTION_KINDS, CROSS, MixtureOfAttentionHeads
from moa_fairseq.modules.router_losses import expert_counts
from moa_fairseq.modules.routing import GATE_NORMALIZATIONS

from ..slow_attention import slow_attention, slow_gates


@st.composite
def cases(draw, kinds=ATTENTION_KINDS, noisy=True):
    """A module and its input."""
    small = st.integers(1, 5)
    kind = draw(st.sampled_from(kinds))
    num_experts = draw(st.integers(1, 6))
    num_selected = draw(st.integers(1, num_experts))
    dtype = draw(st.sampled_from((torch.float32, torch.float64)))
    training = noisy and draw(st.booleans())
    seed = draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    embed_dim, key_dim = draw(small), draw(small)
    module = MixtureOfAttentionHeads(
        embed_dim,
        num_selected,
        num_experts,
        head_dim=draw(small),
        heads_per_expert=draw(st.integers(1, 3)),
        key_dim=key_dim if kind == CROSS else None,
        kind=kind,
        bias=draw(st.booleans()),
        gate_normalization=draw(st.sampled_from(GATE_NORMALIZATIONS)),
        router_noise=draw(st.booleans()),
        sample_topk=draw(st.integers(0, num_selected)),
        router_init_std=2.0,
        output_init_gain=1.0,
    ).to(dtype)
    module.train(training)
    for name, parameter in module.named_parameters():
        if "bias" in name or "noise" in name:
            torch.nn.init.normal_(parameter)
    length, batch = draw(small), draw(st.integers(1, 3))
    query = torch.randn(length, batch, embed_dim, dtype=dtype)
    key = query
    if kind == CROSS:
        key = torch.randn(draw(small), batch, key_dim, dtype=dtype)
    booleans = st.lists(st.booleans(), min_size=batch * len(key), max_size=batch * len(key))
    padding = torch.tensor(draw(st.none() | booleans) or [False] * batch * len(key))
    padding = padding.view(batch, len(key))
    if kind == CROSS:
        rows = st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
        query_padding = torch.tensor(draw(rows)).view(batch, length)
    else:
        query_padding = padding
    causal = kind != CROSS and draw(st.booleans())
    hidden = torch.ones(length, len(key), dtype=torch.bool).triu(1) & causal
    return SimpleNamespace(
        module=module,
        query=query,
        key=key,
        key_padding=padding,
        query_padding=query_padding,
        hidden=hidden,
        seed=seed,
        tolerance={"rtol": 1e-6, "atol": 1e-6 if dtype == torch.float64 else 1e-4},
    )


def run(case, query=None, key=None):
    """Output, weights of the heads, and the routing."""
    seen = []
    handle = case.module.router.register_forward_hook(lambda _, __, routing: seen.append(routing))
    torch.manual_seed(case.seed)
    query = case.query if query is None else query
    key = case.key if key is None else key
    mask = torch.zeros(case.hidden.shape).masked_fill(case.hidden, -torch.inf)
    output, weights = case.module(
        query,
        query if case.module.kind != CROSS else key,
        query if case.module.kind != CROSS else key,
        key_padding_mask=case.key_padding,
        attn_mask=mask if case.hidden.any() else None,
        need_head_weights=True,
        query_padding_mask=case.query_padding if case.module.kind == CROSS else None,
    )
    handle.remove()
    return output, weights, seen[0]


@given(cases())
def test_it_is_what_the_equations_say(case):
    output, weights, routing = run(case)
    expected, expected_weights = slow_attention(
        case.module,
        case.query,
        case.key,
        routing,
        case.query_padding,
        case.key_padding,
        case.hidden,
    )
    assert output.isfinite().all() and weights.isfinite().all()
    torch.testing.assert_close(output.double(), expected, **case.tolerance)
    # What padding, or a row that sees nothing, attends to means nothing.
    real = (~case.query_padding).float()[None, :, :, None]
    sees = (~case.key_padding.all(1)).float()[None, :, None, None]
    shown = weights.double() * real * sees
    torch.testing.assert_close(shown, expected_weights * sees, **case.tolerance)


@given(cases())
def test_routings_are_what_the_equations_say(case):
    _, _, routing = run(case)
    module, router = case.module, case.module.router
    tokens = case.query.transpose(0, 1)
    sampled = router.sample_topk if module.training else 0
    for b, t in torch.cartesian_prod(*map(torch.arange, tokens.shape[:2])).tolist():
        logits, indices = routing.logits[b, t], routing.indices[b, t].tolist()
        if not (module.training and router.noise_weight is not None):
            expected = tokens[b, t].float() @ router.weight.float()
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        probabilities = torch.softmax(logits.double(), 0)
        gates = slow_gates(probabilities, indices, router.gate_normalization)
        expected = torch.tensor(gates, dtype=torch.float32)
        torch.testing.assert_close(routing.gates[b, t], expected, rtol=1e-4, atol=1e-6)
        assert len(set(indices)) == module.num_selected
        by_rank = sorted(logits.tolist(), reverse=True)
        taken = [float(logits[expert]) for expert in indices]
        if module.num_selected < module.num_experts:
            assert (
                taken[: module.num_selected - sampled] == by_rank[: module.num_selected - sampled]
            )
        else:
            assert indices == list(range(module.num_experts))
    if router.gate_normalization != "none":
        torch.testing.assert_close(
            routing.gates.sum(-1), torch.ones(tokens.shape[:2]), rtol=1e-5, atol=1e-5
        )
    counts = expert_counts(routing, case.query_padding)
    assert counts.sum() == module.num_selected * int((~case.query_padding).sum())


@given(cases(noisy=False))
def test_what_padding_holds_changes_nothing(case):
    output, _, _ = run(case)
    query, key = case.query.clone(), case.key.clone()
    query.transpose(0, 1)[case.query_padding] = 1e4
    key.transpose(0, 1)[case.key_padding] = -1e4
    changed, _, _ = run(case, query, key)
    torch.testing.assert_close(changed, output, **case.tolerance)
    assert not changed.transpose(0, 1)[case.query_padding].any()


@given(cases(noisy=False), st.randoms(use_true_random=False))
def test_the_order_of_a_batch_does_not_matter(case, random):
    output, _, _ = run(case)
    order = list(range(case.query.shape[1]))
    random.shuffle(order)
    case.key_padding, case.query_padding = case.key_padding[order], case.query_padding[order]
    shuffled, _, _ = run(case, case.query[:, order], case.key[:, order])
    torch.testing.assert_close(shuffled, output[:, order], **case.tolerance)


@given(cases(noisy=False), st.data())
def test_step_by_step_is_as_all_at_once(case, data):
    """With fairseq's cache, and with hypotheses that change places between the steps."""
    module, cross = case.module, case.module.kind == CROSS
    length, batch, _ = case.query.shape
    case.query_padding = torch.zeros(batch, length, dtype=torch.bool)
    if not cross:
        case.key_padding = case.query_padding
        case.hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    order = torch.tensor(data.draw(st.permutations(range(batch))))
    swapped_at = data.draw(st.integers(0, length - 1))
    # In cross-attention the queries move and so do the keys; what was before has no influence.
    query, key = case.query.clone(), case.key
    state: dict = {}
    steps = []
    for t in range(length):
        if t == swapped_at:
            query = query[:, order]
            module.reorder_incremental_state(state, order)
            steps = [step[:, order] for step in steps]
            if cross:
                key = key[:, order]
                case.key_padding = case.key_padding[order]
        step = query[t : t + 1]
        output, _ = module(
            step,
            key if cross else step,
            key if cross else step,
            key_padding_mask=case.key_padding if cross else None,
            incremental_state=state,
            static_kv=cross,
        )
        steps.append(output)
    expected, _, _ = run(case, query, key)
    torch.testing.assert_close(torch.cat(steps), expected, **case.tolerance)


def test_the_slow_implementation_notices_a_wrong_gate():
    """The comparison can fail: another gate than the module's is seen."""
    torch.manual_seed(1)
    module = MixtureOfAttentionHeads(4, 2, 3, head_dim=2, output_init_gain=1.0)
    query, none = torch.randn(2, 1, 4), torch.zeros(1, 2, dtype=torch.bool)
    seen = []
    module.router.register_forward_hook(lambda _, __, routing: seen.append(routing))
    output, _ = module(query, query, query)
    hidden = torch.zeros(2, 2, dtype=torch.bool)
    right, _ = slow_attention(module, query, query, seen[0], none, none, hidden)
    torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-5)
    other = seen[0]._replace(gates=seen[0].gates.flip(-1) * 1.1)
    wrong, _ = slow_attention(module, query, query, other, none, none, hidden)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(output.double(), wrong, rtol=1e-5, atol=1e-5)
