from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch

from moa_fairseq.modules.moa_attention import ATTENTION_KINDS, MixtureOfAttentionHeads
from moa_fairseq.modules.recording import (
    moa_attentions,
    record_head_weights,
    record_routings,
    routed_modules,
)

from ..slow_attention import slow_attention
from ..toy import toy_model, toy_sample, toy_task


def test_records_every_attention_in_order_with_its_place():
    task = toy_task()
    model = toy_model(task)
    sample = toy_sample(task, [3, 5], [4, 2])
    with record_routings(model) as recorded:
        model(**sample["net_input"])
    assert [(entry.name, entry.kind, entry.position) for entry in recorded] == [
        ("encoder.layers.0.self_attn", "encoder-self", 0),
        ("encoder.layers.1.self_attn", "encoder-self", 1),
        ("decoder.layers.0.self_attn", "decoder-self", 0),
        ("decoder.layers.0.encoder_attn", "cross", 0),
        ("decoder.layers.1.self_attn", "decoder-self", 1),
        ("decoder.layers.1.encoder_attn", "cross", 1),
    ]
    shapes = {entry.kind: tuple(entry.routing.indices.shape) for entry in recorded}
    assert shapes == {"encoder-self": (2, 6, 2), "decoder-self": (2, 5, 2), "cross": (2, 5, 2)}


def test_nothing_is_recorded_outside_the_block_or_after_an_error():
    task = toy_task()
    model = toy_model(task)
    sample = toy_sample(task, [3], [4])
    with pytest.raises(RuntimeError, match="stop"), record_routings(model) as recorded:
        raise RuntimeError("stop")
    model(**sample["net_input"])
    assert recorded == []


def test_names_are_the_models_own_under_a_data_parallel_wrapper():
    task = toy_task()
    model = toy_model(task)
    wrapped = torch.nn.ModuleDict({"module": model})
    sample = toy_sample(task, [3], [4])
    with record_routings(wrapped) as recorded:
        model(**sample["net_input"])
    assert recorded[0].name == "encoder.layers.0.self_attn"


@pytest.mark.parametrize("modules", [*ATTENTION_KINDS, "encoder-self,cross"])
def test_other_modules_are_fairseqs_own(modules):
    task = toy_task()
    model = toy_model(task, moa_modules=modules)
    sample = toy_sample(task, [3], [4])
    with record_routings(model) as recorded:
        model(**sample["net_input"])
    assert {entry.kind for entry in recorded} == set(modules.split(","))


def router_gradients(sample, task, **options):
    model = toy_model(task, **options).train()
    with record_routings(model) as recorded:
        output, _ = model(**sample["net_input"])
    # From the routings alone, and from the output alone: both ways must carry a gradient.
    term = sum(entry.routing.logits.square().sum() for entry in recorded)
    gradients = {}
    for name, value in (("routing", term), ("output", output.square().sum())):
        model.zero_grad()
        value.backward(retain_graph=True)
        gradients[name] = {
            key: parameter.grad.clone()
            for key, parameter in model.named_parameters()
            if "router" in key
        }
    return gradients


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_activations_keep_the_routers_gradient(offload):
    task = toy_task()
    sample = toy_sample(task, [3, 5], [4, 2])
    plain = router_gradients(sample, task)
    checkpointed = router_gradients(
        sample, task, checkpoint_activations=True, offload_activations=offload
    )
    for kind, gradients in plain.items():
        assert len(gradients) == 6
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(checkpointed[kind][name], gradient)


def test_checkpointing_leaves_names_in_the_state_dict_alone():
    task = toy_task()
    assert (
        toy_model(task, checkpoint_activations=True).state_dict().keys()
        == toy_model(task).state_dict().keys()
    )


@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_copy_pickle_and_save_after_training(checkpointed):
    task = toy_task()
    model = toy_model(task, checkpoint_activations=checkpointed).train()
    sample = toy_sample(task, [3, 5], [4, 2])
    output = model(**sample["net_input"])[0]
    output.sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for twin in twins:
        assert torch.equal(twin(**sample["net_input"])[0], output)


def test_dropped_layers_leave_no_entry():
    task = toy_task()
    model = toy_model(task, encoder_layers=4, encoder_layerdrop=0.5).train()
    sample = toy_sample(task, [3], [4])
    counts = set()
    for seed in range(8):
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        with record_routings(model) as recorded:
            model(**sample["net_input"])
        places = [entry.position for entry in recorded if entry.kind == "encoder-self"]
        assert places == sorted(places)
        counts.add(len(places))
    assert len(counts) > 1


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs torch 2.0")
@pytest.mark.parametrize("experts", [2, 4], ids=["all experts", "two of four"])
def test_a_compiled_attention_leaves_its_routings_too(experts):
    model = torch.nn.ModuleDict({"attention": MixtureOfAttentionHeads(8, 2, experts, 4)})
    # Without code generation: what is looked at is which Python code the compiler sees again.
    compiled = torch.compile(model["attention"], backend="eager")
    tokens = torch.randn(3, 2, 8)
    compiled(tokens, tokens, tokens)  # traced before anyone records
    for _ in range(2):
        with record_routings(compiled) as recorded:
            compiled(tokens, tokens, tokens)
        with record_routings(model) as expected:
            model["attention"](tokens, tokens, tokens)
        assert [entry.kind for entry in recorded] == ["encoder-self"]
        torch.testing.assert_close(recorded[0].routing.gates, expected[0].routing.gates)
        assert recorded[0].routing.logits.requires_grad


def test_names_are_the_models_own_when_it_is_compiled():
    wrapped = torch.nn.ModuleDict({"_orig_mod": toy_model()})
    assert next(routed_modules(wrapped))[0] == "encoder.layers.0.self_attn"


def slow_weights_of(model, sample):
    """Weights of every attention by the slow way, from what went into it."""
    calls = {}
    for name, _, module in moa_attentions(model):

        def forward(*args, original=module.forward, name=name, **kwargs):
            calls[name] = kwargs
            return original(*args, **kwargs)

        vars(module)["forward"] = forward
    with record_routings(model) as routings, torch.no_grad():
        model(**sample["net_input"])
    expected = {}
    for entry in routings:
        module, given = model.get_submodule(entry.name), calls[entry.name]
        del vars(module)["forward"]
        query, key = given["query"], given["key"]
        length, batch, _ = query.shape
        padding = given["key_padding_mask"]
        none = torch.zeros(batch, len(key), dtype=torch.bool)
        padding = none if padding is None else padding
        own = torch.zeros(batch, length, dtype=torch.bool) if entry.kind == "cross" else padding
        mask = given.get("attn_mask")
        hidden = torch.zeros(length, len(key)).bool() if mask is None else mask < 0
        _, expected[entry.name] = slow_attention(
            module, query, key, entry.routing, own, padding, hidden
        )
    return expected


@pytest.mark.parametrize("heads", [1, 2])
def test_head_weights_are_those_of_the_slow_attention(heads):
    task = toy_task()
    model = toy_model(task, heads_per_expert=heads).eval()
    sample = toy_sample(task, [3, 5], [4, 2])
    with record_head_weights(model) as recorded, torch.no_grad():
        model(**sample["net_input"])
    expected = slow_weights_of(model, sample)
    assert [entry.name for entry in recorded] == [name for name, _, _ in moa_attentions(model)]
    target = sample["net_input"]["prev_output_tokens"]
    for entry in recorded:
        real = sample["net_input"]["src_tokens"].ne(1) if "enc" in entry.kind else target.ne(1)
        assert real.any()
        for sentence, token in real.nonzero().tolist():
            torch.testing.assert_close(
                entry.weights[:, sentence, token].double(),
                expected[entry.name][:, sentence, token],
                rtol=1e-5,
                atol=1e-6,
            )


def test_recording_head_weights_changes_nothing_and_ends():
    task = toy_task()
    model = toy_model(task).eval()
    sample = toy_sample(task, [3, 5], [4, 2])
    before, extra = model(**sample["net_input"])
    attention = model.decoder.layers[0].encoder_attn
    x = torch.randn(4, 2, 16)
    plain = [attention(x, x, x, need_weights=need, need_head_weights=need) for need in (0, 1)]
    with record_head_weights(model) as recorded:
        during, extra_during = model(**sample["net_input"])
        inside = [attention(x, x, x, need_weights=need, need_head_weights=need) for need in (0, 1)]
    assert torch.equal(before, during)
    torch.testing.assert_close(extra["attn"][0], extra_during["attn"][0])
    assert plain[0][1] is None and inside[0][1] is None
    assert torch.equal(plain[1][1], inside[1][1])
    count = len(recorded)
    model(**sample["net_input"])
    assert len(recorded) == count == 8
    assert "forward" not in vars(attention)
