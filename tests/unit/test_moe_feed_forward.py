from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from torch import nn

from moa_fairseq.analysis.costs import count_parameters, linear_macs
from moa_fairseq.cli.profile import build
from moa_fairseq.criterions.label_smoothed_cross_entropy_with_router_loss import (
    LabelSmoothedCrossEntropyWithRouterLoss,
)
from moa_fairseq.modules.moe_feed_forward import MixtureOfFeedForwards, padding_of_tokens
from moa_fairseq.modules.recording import record_routings
from moa_fairseq.modules.router_losses import load_balancing_loss
from moa_fairseq.modules.routing import GATE_NORMALIZATIONS

from ..toy import toy_model, toy_sample, toy_task

DIM, HIDDEN = 6, 10


def mixture(selected=2, experts=4, seed=0, **options):
    torch.manual_seed(seed)
    module = MixtureOfFeedForwards(
        DIM, HIDDEN, selected, experts, nn.functional.gelu, router_init_std=0.5, **options
    ).double()
    for experts_of_one_side in (module.in_experts, module.out_experts):
        nn.init.normal_(experts_of_one_side.bias)
    return module


def tokens_and_padding(length=5, batch=3, seed=1):
    torch.manual_seed(seed)
    tokens = torch.randn(length, batch, DIM, dtype=torch.float64)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1, -2:] = True
    padding[2, :1] = True
    return tokens, padding


def slow(module, tokens, padding, normalization):
    """Token by token and expert by expert, from the definition."""
    rows = []
    for position in range(tokens.shape[0]):
        row = []
        for sentence in range(tokens.shape[1]):
            x = tokens[position, sentence]
            if padding[sentence, position]:
                row.append(torch.zeros_like(x))
                continue
            logits = x.float() @ module.router.weight.float()
            p = logits.exp() / logits.exp().sum()
            chosen = sorted(range(module.num_experts), key=lambda i: -p[i].item())
            chosen = chosen[: module.num_selected]
            total = sum(p[i] for i in chosen)
            if normalization == "none":
                gates, scale = {i: p[i] for i in chosen}, module.num_experts
            else:
                total = total.detach() if normalization == "detached" else total
                gates, scale = {i: p[i] / total for i in chosen}, module.num_selected
            y = torch.zeros_like(x)
            for i in chosen:
                hidden = x @ module.in_experts.weight[i] + module.in_experts.bias[i]
                hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))  # gelu
                out = hidden @ module.out_experts.weight[i] + module.out_experts.bias[i]
                y = y + gates[i] * scale * out
            row.append(y)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("normalization", GATE_NORMALIZATIONS)
@pytest.mark.parametrize("selected,experts", [(1, 4), (2, 4), (3, 3), (1, 1)])
def test_equals_the_definition_output_and_every_gradient(selected, experts, normalization):
    tokens, padding = tokens_and_padding()
    weight = torch.randn_like(tokens)
    results = []
    for way in ("fast", "slow"):
        module = mixture(selected, experts, gate_normalization=normalization)
        x = tokens.clone().requires_grad_()
        if way == "fast":
            with padding_of_tokens(padding):
                output = module(x)
        else:
            output = slow(module, x, padding, normalization)
        (output * weight).sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append((output, x.grad, gradients))
    (output, gradient, gradients), (expected, expected_gradient, expected_gradients) = results
    # The router computes in float32.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output, expected, **close)
    torch.testing.assert_close(gradient, expected_gradient, **close)
    assert gradients.keys() == expected_gradients.keys()
    for name, value in gradients.items():
        if expected_gradients[name] is None:
            assert not value.any()
            continue
        torch.testing.assert_close(value, expected_gradients[name], **close)


def test_with_one_expert_it_is_fairseqs_feed_forward():
    task = toy_task()
    sample = toy_sample(task, [3, 6], [4, 2])
    dense = toy_model(task)
    moe = toy_model(task, ffn_type="moe", ffn_num_experts=1, ffn_num_selected=1)
    state = moe.state_dict()
    for name, tensor in dense.state_dict().items():
        for layer, experts in (("fc1", "in_experts"), ("fc2", "out_experts")):
            if f".{layer}." in name:
                name = name.replace(layer, f"fc1.{experts}")
                tensor = tensor.t() if tensor.dim() == 2 else tensor
                tensor = tensor.unsqueeze(0)
        assert state[name].shape == tensor.shape, name
        state[name] = tensor
    moe.load_state_dict(state)
    outputs = [model.train()(**sample["net_input"])[0] for model in (dense, moe)]
    real = sample["target"].ne(task.src_dict.pad())
    torch.testing.assert_close(outputs[1][real], outputs[0][real])
    for output in outputs:
        output[real].square().sum().backward()
    torch.testing.assert_close(
        moe.encoder.layers[0].fc1.in_experts.weight.grad[0].t(),
        dense.encoder.layers[0].fc1.weight.grad,
    )


@pytest.mark.parametrize("selected,experts", [(2, 4), (3, 3)])
def test_padding_is_zero_and_no_expert_sees_it(selected, experts):
    tokens, padding = tokens_and_padding()
    other = tokens.clone()
    other[padding.t()] = 1e3
    results = []
    for x in (tokens, other):
        module = mixture(selected, experts)
        with padding_of_tokens(padding):
            output = module(x)
        assert not output[padding.t()].any()
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    # Outside the block nothing is padding any more.
    assert module(tokens)[padding.t()].all()


def test_a_token_does_not_depend_on_its_batch():
    tokens, _ = tokens_and_padding()
    module = mixture()
    together = module(tokens)
    for sentence in range(tokens.shape[1]):
        for position in range(tokens.shape[0]):
            alone = module(tokens[position : position + 1, sentence : sentence + 1])
            torch.testing.assert_close(alone[0, 0], together[position, sentence])


def test_an_idle_expert_has_a_gradient_of_zero():
    module = mixture(1, 4)
    tokens, padding = tokens_and_padding()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:, 2] = 1.0
    with padding_of_tokens(padding):
        module(tokens.abs()).sum().backward()
    for name, parameter in module.named_parameters():
        if "experts" in name:
            assert parameter.grad[2].any()
            assert not parameter.grad[[0, 1, 3]].any()


@pytest.mark.parametrize("selected,experts", [(1, 8), (4, 8), (8, 8)])
@pytest.mark.parametrize("normalization", GATE_NORMALIZATIONS)
def test_the_output_starts_as_large_as_that_of_fairseqs(selected, experts, normalization):
    torch.manual_seed(0)
    tokens = torch.randn(40, 10, 64)
    module = MixtureOfFeedForwards(
        64, 256, selected, experts, torch.relu, gate_normalization=normalization
    )
    dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    assert module(tokens).std().item() == pytest.approx(dense(tokens).std().item(), rel=0.25)


def test_dropout_acts_on_hidden_units_in_training_only():
    tokens, _ = tokens_and_padding()
    module = mixture(activation_dropout=0.5)
    plain = mixture()
    assert torch.equal(module.eval()(tokens), plain(tokens))
    assert not torch.allclose(module.train()(tokens), plain(tokens))
    dropped = mixture(activation_dropout=1.0).train()
    with torch.no_grad():
        dropped.out_experts.bias.zero_()
    assert not dropped(tokens).any()


def test_quantization_noise_changes_training_only_and_needs_fitting_blocks():
    tokens, _ = tokens_and_padding()
    module = mixture(quant_noise_pq=0.5, quant_noise_block_size=2)
    assert torch.equal(module.eval()(tokens), mixture()(tokens))
    assert not torch.allclose(module.train()(tokens), mixture()(tokens))
    with pytest.raises(ValueError, match="--quant-noise-pq-block-size 4"):
        mixture(quant_noise_pq=0.5, quant_noise_block_size=4)


@pytest.mark.parametrize("selected,experts", [(2, 4), (3, 3)])
def test_half_precision_routes_as_full_precision(selected, experts):
    tokens, padding = (
        value.float() if value.is_floating_point() else value for value in tokens_and_padding()
    )
    module = mixture(selected, experts).float()
    with padding_of_tokens(padding):
        expected = module(tokens)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            record_routings(nn.ModuleList([module])) as recorded,
        ):
            output = module(tokens)
    assert recorded[0].routing.logits.dtype == torch.float32
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.1)
    output.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="encoder-ffn, decoder-ffn"):
        mixture(kind="cross")


MOE = {"ffn_type": "moe", "ffn_num_experts": 5, "ffn_num_selected": 2}


def test_padding_changes_no_output_and_no_loss_of_the_model():
    task = toy_task()
    model = toy_model(task, **MOE).train()
    criterion = build_criterion(task)
    samples = [toy_sample(task, [3, 6], [4, 2], extra_padding=extra) for extra in (0, 5)]
    real = samples[0]["target"].ne(task.src_dict.pad())
    outputs = [model(**sample["net_input"])[0][:, : real.shape[1]][real] for sample in samples]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    losses = [criterion(model, sample)[0] for sample in samples]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_routings_are_recorded_with_kind_and_place():
    task = toy_task()
    model = toy_model(task, **MOE)
    sample = toy_sample(task, [3, 5], [4, 2])
    with record_routings(model) as recorded:
        model(**sample["net_input"])
    found = [(entry.name, entry.kind, entry.position) for entry in recorded if "ffn" in entry.kind]
    assert found == [
        ("encoder.layers.0.fc1", "encoder-ffn", 0),
        ("encoder.layers.1.fc1", "encoder-ffn", 1),
        ("decoder.layers.0.fc1", "decoder-ffn", 0),
        ("decoder.layers.1.fc1", "decoder-ffn", 1),
    ]
    assert len(recorded) == 10
    shapes = {entry.kind: tuple(entry.routing.indices.shape) for entry in recorded}
    assert shapes["encoder-ffn"] == (2, 6, 2)
    assert shapes["decoder-ffn"] == (2, 5, 2)


def build_criterion(task, **weights):
    target = SimpleNamespace(target_dictionary=task.target_dictionary)
    return LabelSmoothedCrossEntropyWithRouterLoss(target, False, 0.1, **weights)


def test_the_criterion_adds_and_logs_their_losses():
    task = toy_task()
    model = toy_model(task, **MOE).train()
    sample = toy_sample(task, [3, 5], [4, 2])
    zero = {"load_balance_weight": 0.0, "router_z_weight": 0.0}
    plain, size, _ = build_criterion(task, **zero)(model, sample)
    with record_routings(model) as recorded:
        loss, _, logged = build_criterion(task, **{**zero, "load_balance_weight": 0.5})(
            model, sample
        )
    pad = task.src_dict.pad()
    expected = plain
    for entry in recorded:
        side = "src_tokens" if entry.kind.startswith("encoder") else "prev_output_tokens"
        padding = sample["net_input"][side].eq(pad)
        expected = expected + size * 0.5 * load_balancing_loss(entry.routing, padding)
    torch.testing.assert_close(loss, expected)
    with metrics.aggregate(new_root=True) as aggregator:
        LabelSmoothedCrossEntropyWithRouterLoss.reduce_metrics([logged])
    values = aggregator.get_smoothed_values()
    for kind in ("encoder_ffn", "decoder_ffn"):
        assert 0 < values[f"routing_entropy_{kind}"] < math.log(5)
        assert values[f"load_cv_{kind}"] > 0
        assert 0 <= values[f"unused_experts_{kind}"] < 1


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_activations_change_no_gradient(offload):
    task = toy_task()
    sample = toy_sample(task, [3, 5], [4, 2])
    gradients = []
    for options in ({}, {"checkpoint_activations": True, "offload_activations": offload}):
        model = toy_model(task, **MOE, **options).train()
        build_criterion(task, load_balance_weight=1.0)(model, sample)[0].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0]["encoder.layers.0.fc1.router.weight"].any()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_models_copy_and_pickle_after_training():
    task = toy_task()
    model = toy_model(task, **MOE).train()
    sample = toy_sample(task, [3, 5], [4, 2])
    output = model(**sample["net_input"])[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**sample["net_input"])[0], output)


def test_costs_by_hand():
    options = ["--share-all-embeddings", "--decoder-ffn-embed-dim", "96"]
    sizes = ["--ffd-type", "moe", "--ffn-num-experts", "6", "--ffn-num-selected", "3"]
    dense = build("moa_transformer_tiny", 100, options)
    moe = build("moa_transformer_tiny", 100, [*options, *sizes])
    # d 128, hidden sizes 256 and 96, two layers a side.
    hidden = 2 * 256 + 2 * 96
    added = 6 * (2 * 128 * hidden + hidden + 4 * 128) + 4 * 128 * 6
    removed = 2 * 128 * hidden + hidden + 4 * 128
    assert count_parameters(moe) - count_parameters(dense) == added - removed
    assert linear_macs(moe, 7) - linear_macs(dense, 7) == 7 * (3 - 1) * 2 * 128 * hidden
