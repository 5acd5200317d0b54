from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.models.transformer import TransformerModelBase

from moa_fairseq.criterions.label_smoothed_cross_entropy_with_router_loss import (
    LabelSmoothedCrossEntropyWithRouterLoss as Criterion,
)
from moa_fairseq.errors import UsageError
from moa_fairseq.models.config import MoATransformerConfig, transformer_config
from moa_fairseq.modules.recording import record_routings
from moa_fairseq.modules.router_losses import load_balancing_loss, router_z_loss

from ..toy import SMALL, toy_model, toy_sample, toy_task


def build(task, alpha=0.01, beta=0.001, gamma=0.0, sentence_avg=False, smoothing=0.1):
    criterion_task = SimpleNamespace(target_dictionary=task.target_dictionary)
    return Criterion(
        criterion_task,
        sentence_avg=sentence_avg,
        label_smoothing=smoothing,
        load_balance_weight=alpha,
        router_z_weight=beta,
        load_cv_squared_weight=gamma,
    )


def router_gradient(model, criterion, samples):
    """The gradient that the optimizer sees: fairseq divides the sum by the sample size."""
    model.zero_grad()
    total = 0
    for sample in samples:
        loss, sample_size, _ = criterion(model, sample)
        loss.backward()
        total += sample_size
    return torch.cat(
        [p.grad.flatten() / total for name, p in model.named_parameters() if "router" in name]
    )


def effect(task, samples, alpha, **options):
    """What α adds to the router's gradient."""
    model = toy_model(task)
    with_alpha = router_gradient(model, build(task, alpha, 0.0, **options), samples)
    without = router_gradient(model, build(task, 0.0, 0.0, **options), samples)
    return with_alpha - without


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_alpha_means_the_same_at_any_batch_size_padding_and_update_freq(sentence_avg):
    task = toy_task()
    options = {"sentence_avg": sentence_avg}
    sample = toy_sample(task, [3, 5], [4, 2])
    expected = effect(task, [sample], 0.1, **options)
    assert expected.norm() > 1e-4

    twice = toy_sample(task, [3, 5], [4, 2])
    for key in ("src_tokens", "prev_output_tokens", "src_lengths"):
        twice["net_input"][key] = twice["net_input"][key].repeat(
            2, *[1] * (twice["net_input"][key].dim() - 1)
        )
    twice["target"] = twice["target"].repeat(2, 1)
    twice["ntokens"] *= 2
    padded = toy_sample(task, [3, 5], [4, 2], extra_padding=6)
    for samples in ([twice], [padded], [sample] * 4):
        torch.testing.assert_close(
            effect(task, samples, 0.1, **options), expected, rtol=1e-3, atol=1e-6
        )
    torch.testing.assert_close(
        effect(task, [sample], 0.3, **options), 3 * expected, rtol=1e-3, atol=1e-6
    )


def test_micro_batches_count_by_their_own_sample_size():
    task = toy_task()
    short, long = toy_sample(task, [3], [2]), toy_sample(task, [6, 5, 7], [9, 4, 8], seed=1)
    sizes = short["ntokens"], long["ntokens"]
    assert sizes == (3, 24)
    alone = [effect(task, [sample], 0.1) for sample in (short, long)]
    expected = (sizes[0] * alone[0] + sizes[1] * alone[1]) / sum(sizes)
    torch.testing.assert_close(effect(task, [short, long], 0.1), expected, rtol=1e-3, atol=1e-6)


def test_loss_is_the_model_loss_plus_the_sum_over_modules():
    task = toy_task()
    model = toy_model(task).train()
    sample = toy_sample(task, [3, 5], [4, 2])
    plain, size, _ = build(task, 0, 0)(model, sample)
    with record_routings(model) as recorded:
        loss, _, logged = build(task, 0.5, 0.25)(model, sample)
    pad = task.source_dictionary.pad()
    expected = plain
    for entry in recorded:
        tokens = "src_tokens" if entry.kind == "encoder-self" else "prev_output_tokens"
        padding = sample["net_input"][tokens].eq(pad)
        expected = expected + size * 0.5 * load_balancing_loss(entry.routing, padding)
        expected = expected + size * 0.25 * router_z_loss(entry.routing, padding)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logged["loss"], plain.detach())


def test_each_weight_changes_the_gradient():
    task = toy_task()
    model = toy_model(task)
    sample = toy_sample(task, [3, 5], [4, 2])
    base = router_gradient(model, build(task, 0, 0, 0), [sample])
    for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.allclose(router_gradient(model, build(task, *weights), [sample]), base)


def test_validation_is_without_router_terms():
    task = toy_task()
    model = toy_model(task).eval()
    sample = toy_sample(task, [3, 5], [4, 2])
    loss, _, logged = build(task, 10.0, 10.0)(model, sample)
    plain, _, _ = build(task, 0, 0)(model, sample)
    assert torch.equal(loss, plain)
    assert torch.equal(logged["loss"], plain)
    assert logged["router_loss"] > 0


def test_with_fairseqs_own_transformer_it_is_fairseqs_own_criterion():
    task = toy_task()
    torch.manual_seed(0)
    cfg = transformer_config(MoATransformerConfig(**SMALL))
    model = TransformerModelBase.build_model(cfg, task).train()
    sample = toy_sample(task, [3, 5], [4, 2])
    stock = LabelSmoothedCrossEntropyCriterion(
        SimpleNamespace(target_dictionary=task.target_dictionary), False, 0.1
    )
    expected, ours = stock(model, sample), build(task)(model, sample)
    assert torch.equal(ours[0], expected[0])
    assert ours[1:] == expected[1:]


def reduce(logging_outputs):
    with metrics.aggregate(new_root=True) as aggregator:
        Criterion.reduce_metrics(logging_outputs)
    return aggregator


def test_logged_statistics_by_hand():
    size = 10
    entropy, tokens = math.log(4) * 8, 8
    outputs = [
        {
            "loss": torch.tensor(20.0),
            "nll_loss": torch.tensor(10.0),
            "ntokens": size,
            "nsentences": 2,
            "sample_size": size,
            "router_loss": torch.tensor(0.5) * size,
            "load_balance_loss": torch.tensor(1.25) * size,
            "router_z_loss": torch.tensor(2.0) * size,
            "load_cv_squared_loss": torch.tensor(0.1) * size,
            "_load_encoder-self_0": torch.tensor([4.0, 4.0, 4.0, 4.0]),
            "_load_encoder-self_1": torch.tensor([8.0, 8.0, 0.0, 0.0]),
            "_entropy_encoder-self": torch.tensor(entropy),
            "_tokens_encoder-self": torch.tensor(float(tokens)),
        },
        {
            "loss": torch.tensor(60.0),
            "nll_loss": torch.tensor(30.0),
            "ntokens": 3 * size,
            "nsentences": 2,
            "sample_size": 3 * size,
            "router_loss": torch.tensor(0.9) * 3 * size,
            "load_balance_loss": torch.tensor(1.25) * 3 * size,
            "router_z_loss": torch.tensor(2.0) * 3 * size,
            "load_cv_squared_loss": torch.tensor(0.1) * 3 * size,
            "_load_encoder-self_0": torch.tensor([4.0, 4.0, 4.0, 4.0]),
            "_load_encoder-self_1": torch.tensor([0.0, 8.0, 8.0, 0.0]),
            "_entropy_encoder-self": torch.tensor(0.0),
            "_tokens_encoder-self": torch.tensor(float(tokens)),
        },
    ]
    values = reduce(outputs).get_smoothed_values()
    assert values["loss"] == pytest.approx(2 / math.log(2), abs=1e-3)
    assert values["router_loss"] == pytest.approx(0.8, abs=1e-4)
    assert values["load_balance_loss"] == pytest.approx(1.25)
    # Layer 0 is balanced; layer 1 has loads 8, 16, 8, 0: deviation √32 of mean 8.
    assert values["load_cv_encoder_self"] == pytest.approx((0 + math.sqrt(32) / 8) / 2, abs=1e-4)
    assert values["unused_experts_encoder_self"] == pytest.approx((0 + 1 / 4) / 2)
    assert values["routing_entropy_encoder_self"] == pytest.approx(math.log(4) / 2, abs=1e-4)
    assert not any(name.startswith("_") for name in values)


def test_metrics_do_not_depend_on_how_batches_are_grouped():
    task = toy_task()
    model = toy_model(task).eval()
    criterion = build(task)
    samples = [toy_sample(task, [3, 5], [4, 2], seed=s) for s in range(3)]
    logged = [criterion(model, sample)[2] for sample in samples]
    together = reduce(logged).get_smoothed_values()
    summed = {key: sum(output[key] for output in logged) for key in logged[0]}
    assert reduce([summed]).get_smoothed_values() == pytest.approx(together)
    with metrics.aggregate(new_root=True) as one_by_one:
        for output in logged:
            Criterion.reduce_metrics([output])
    assert one_by_one.get_smoothed_values() == pytest.approx(together, abs=2e-3)


def test_logging_outputs_can_be_summed_across_workers():
    assert Criterion.logging_outputs_can_be_summed()


@pytest.mark.parametrize(
    "weights,flag",
    [
        ((-0.1, 0, 0), "--load-balance-weight"),
        ((0, -1, 0), "--router-z-weight"),
        ((0, 0, float("nan")), "--load-cv-squared-weight"),
    ],
)
def test_negative_weights_are_refused(weights, flag):
    with pytest.raises(UsageError, match=flag):
        build(toy_task(), *weights)


def test_dropped_layers_send_the_same_names_and_count_for_nothing():
    task = toy_task()
    sample = toy_sample(task, [3, 5], [4, 2])
    everything = build(task)(toy_model(task).train(), sample)[2]
    model = toy_model(task, encoder_layerdrop=0.9, decoder_layerdrop=0.9).train()
    empty = False
    for seed in range(12):
        torch.manual_seed(seed)
        with record_routings(model) as recorded:
            logged = build(task)(model, sample)[2]
        assert logged.keys() == everything.keys()
        ran = {(entry.kind, entry.position) for entry in recorded}
        kinds = {kind for kind, _ in ran}
        empty = empty or not ran
        values = reduce([logged]).get_smoothed_values()
        for name, load in logged.items():
            if name.startswith("_load"):
                _, _, kind, position = name.split("_")
                assert bool(load.any()) == ((kind, int(position)) in ran)
        for kind in kinds:
            loads = [logged[f"_load_{k}_{p}"] for k, p in ran if k == kind]
            unused = sum((load == 0).float().mean().item() for load in loads) / len(loads)
            key = f"unused_experts_{kind.replace('-', '_')}"
            assert values[key] == pytest.approx(unused, abs=1e-4)
    assert empty  # one of the seeds drops every layer
