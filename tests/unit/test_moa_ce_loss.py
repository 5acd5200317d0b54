from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.logging import metrics

from moa_fairseq.criterions.label_smoothed_cross_entropy_with_router_loss import (
    LabelSmoothedCrossEntropyWithRouterLoss,
)
from moa_fairseq.criterions.moa_ce_loss import MoACrossEntropyLoss
from moa_fairseq.criterions.router_terms import RouterLossWeights, router_loss
from moa_fairseq.modules.recording import record_routings

from ..paths import reference_files
from ..toy import toy_model, toy_sample, toy_task
from .test_reference import build as build_module
from .test_reference import load as load_reference

WEIGHTS = {
    "load_balance_weight": 0.7,
    "router_z_weight": 0.3,
    "load_cv_squared_weight": 0.2,
}


def build(task, smoothing=0.1, criterion=MoACrossEntropyLoss, **weights):
    weights = {**dict.fromkeys(WEIGHTS, 0.0), **weights}
    target = SimpleNamespace(target_dictionary=task.target_dictionary)
    return criterion(target, sentence_avg=False, label_smoothing=smoothing, **weights)


@pytest.mark.parametrize("path", reference_files(), ids=lambda path: path.stem)
def test_the_router_term_is_the_auxiliary_loss_of_the_authors_code(path):
    reference = load_reference(path)
    module = build_module(reference)
    causal = None
    if reference.get("causal"):
        length = reference["query"].shape[0]
        causal = torch.full((length, length), float("-inf")).triu(1)
    with record_routings(module) as recorded:
        module(
            reference["query"],
            reference["key"],
            reference["key"],
            key_padding_mask=reference["key_padding_mask"],
            query_padding_mask=reference["query_padding_mask"],
            attn_mask=causal,
        )
    weights = RouterLossWeights(
        reference["weight_switch"], reference["weight_z"], reference["weight_cv"]
    )
    masks = {module.kind: reference["query_padding_mask"]}
    term, statistics = router_loss(module, recorded, masks, weights, padding_in_z=True)
    assert term.item() == pytest.approx(reference["aux_loss"], rel=1e-5)
    assert statistics["router_z_loss"].item() == pytest.approx(
        reference["z_loss_with_padding"], rel=1e-5
    )


def total_by_hand(model, sample, pad, smoothing):
    """The authors' loss in loops: smoothed cross entropy, and every router's terms, unscaled."""
    with record_routings(model) as recorded:
        logits, _ = model(**sample["net_input"])
    log_probabilities = logits.log_softmax(dim=-1)
    words = logits.shape[-1]
    cross_entropy = likelihood = 0.0
    for row, target in zip(log_probabilities.flatten(0, 1), sample["target"].flatten()):
        if target == pad:
            continue
        uniform = smoothing / (words - 1)
        likelihood -= row[target].item()
        cross_entropy -= (1 - smoothing - uniform) * row[target].item()
        cross_entropy -= uniform * row.sum().item()
    router = 0.0
    for _, kind, _, routing in recorded:
        inputs = sample["net_input"]
        tokens = inputs["src_tokens" if kind == "encoder-self" else "prev_output_tokens"]
        experts = routing.logits.shape[-1]
        mass, count, selected = ([0.0] * experts for _ in range(3))
        z, positions = 0.0, 0
        for batch in range(tokens.shape[0]):
            for position in range(tokens.shape[1]):
                x = routing.logits[batch, position].tolist()
                positions += 1
                z += math.log(sum(math.exp(value) for value in x)) ** 2
                if tokens[batch, position] == pad:
                    continue
                total = sum(math.exp(value) for value in x)
                p = [math.exp(value) / total for value in x]
                for expert in range(experts):
                    mass[expert] += p[expert]
                for expert in sorted(range(experts), key=lambda i: -p[i])[:2]:
                    count[expert] += 1
                    selected[expert] += p[expert]
        balance = sum(m / sum(mass) * c / sum(count) for m, c in zip(mass, count)) * experts
        share = [s / sum(selected) for s in selected]
        mean = sum(share) / experts
        variance = sum((s - mean) ** 2 for s in share) / (experts - 1)
        router += WEIGHTS["load_balance_weight"] * balance
        router += WEIGHTS["router_z_weight"] * z / positions
        router += WEIGHTS["load_cv_squared_weight"] * variance / mean**2
    return cross_entropy, likelihood, router


@pytest.mark.parametrize("training", [True, False])
def test_total_by_hand(training):
    task = toy_task()
    model = toy_model(task).train(training)
    sample = toy_sample(task, [3, 6], [4, 2])
    cross_entropy, likelihood, router = total_by_hand(model, sample, task.src_dict.pad(), 0.1)
    loss, size, logged = build(task, 0.1, **WEIGHTS)(model, sample)
    assert size == sample["ntokens"] == 8
    assert loss.item() == pytest.approx(cross_entropy + router, rel=1e-5)
    assert logged["loss"].item() == pytest.approx(cross_entropy + router, rel=1e-5)
    assert logged["nll_loss"].item() == pytest.approx(likelihood, rel=1e-5)
    with metrics.aggregate(new_root=True) as aggregator:
        MoACrossEntropyLoss.reduce_metrics([logged])
    values = aggregator.get_smoothed_values()
    assert values["loss"] == pytest.approx((cross_entropy + router) / 8 / math.log(2), abs=1e-3)
    assert values["nll_loss"] == pytest.approx(likelihood / 8 / math.log(2), abs=1e-3)
    assert values["router_loss"] == pytest.approx(router, rel=1e-3)
    assert values["routing_entropy_cross"] > 0


def test_its_router_gradient_is_that_of_the_scaled_criterion_over_the_sample_size():
    task = toy_task()
    sample = toy_sample(task, [5, 5], [4, 4])  # no padding, which the z-losses count differently

    def effect(criterion):
        gradients = []
        for weights in (WEIGHTS, {}):
            model = toy_model(task).train()
            build(task, criterion=criterion, **weights)(model, sample)[0].backward()
            gradients.append(
                torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "router" in n])
            )
        return gradients[0] - gradients[1]

    theirs, scaled = effect(MoACrossEntropyLoss), effect(LabelSmoothedCrossEntropyWithRouterLoss)
    assert theirs.norm() > 1e-3
    torch.testing.assert_close(theirs * sample["ntokens"], scaled, rtol=1e-3, atol=1e-5)


def test_padding_counts_in_the_z_loss_only_here():
    task = toy_task()
    model = toy_model(task).eval()
    samples = [toy_sample(task, [3, 5], [4, 2], extra_padding=extra) for extra in (0, 7)]
    for criterion, equal in (
        (MoACrossEntropyLoss, False),
        (LabelSmoothedCrossEntropyWithRouterLoss, True),
    ):
        logged = [
            build(task, criterion=criterion, **WEIGHTS)(model, sample)[2] for sample in samples
        ]
        values = [output["router_z_loss"] for output in logged]
        assert torch.allclose(*values, rtol=1e-4) == equal
        balances = [output["load_balance_loss"] for output in logged]
        assert torch.allclose(*balances, rtol=1e-4)


def test_it_is_registered_with_the_authors_defaults():
    assert CRITERION_REGISTRY["moa_ce_loss"] is MoACrossEntropyLoss
    defaults = CRITERION_DATACLASS_REGISTRY["moa_ce_loss"]()
    assert [getattr(defaults, name) for name in WEIGHTS] == [0, 0, 0]
