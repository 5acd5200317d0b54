from __future__ import annotations

import math

import pytest
import torch
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics

from moa_fairseq.criterions.masked_lm_with_router_loss import (
    MaskedLMWithRouterLoss,
    MaskedLMWithRouterLossConfig,
)
from moa_fairseq.errors import UsageError
from moa_fairseq.modules.recording import record_routings
from moa_fairseq.modules.router_losses import (
    cv_squared_loss,
    load_balancing_loss,
    router_z_loss,
)

from ..toy_masked_lm import toy_masked_lm, toy_masked_sample, toy_masked_task


def build(alpha=0.01, beta=0.001, gamma=0.0):
    config = MaskedLMWithRouterLossConfig(
        tpu=False, load_balance_weight=alpha, router_z_weight=beta, load_cv_squared_weight=gamma
    )
    return MaskedLMWithRouterLoss(config, toy_masked_task())


def plain():
    return MaskedLmLoss(MaskedLmConfig(tpu=False), toy_masked_task())


@pytest.mark.parametrize("options", [{}, {"ffn_type": "moe"}])
def test_loss_is_fairseqs_plus_masked_tokens_times_the_sum_over_modules(options):
    model, sample = toy_masked_lm(**options).train(), toy_masked_sample([7, 4])
    expected, size, _ = plain()(model, sample)
    assert size == 4
    with record_routings(model) as recorded:
        loss, sample_size, logged = build(0.5, 0.25, 0.125)(model, sample)
    assert sample_size == size and len(recorded) == (4 if options else 2)
    torch.testing.assert_close(logged["loss"], expected.detach())
    padding = sample["net_input"]["src_tokens"].eq(1)
    assert padding.any()
    for entry in recorded:
        expected = expected + size * 0.5 * load_balancing_loss(entry.routing, padding)
        expected = expected + size * 0.25 * router_z_loss(entry.routing, padding)
        expected = expected + size * 0.125 * cv_squared_loss(entry.routing, padding)
    torch.testing.assert_close(loss, expected)


def test_the_models_loss_is_cross_entropy_of_the_masked_tokens():
    model, sample = toy_masked_lm().eval(), toy_masked_sample([7, 4])
    loss, size, _ = build()(model, sample)
    logits, _ = model(**sample["net_input"])
    expected = 0.0
    for row, column in sample["target"].ne(1).nonzero().tolist():
        scores = logits[row, column].tolist()
        total = math.log(sum(math.exp(score) for score in scores))
        expected += total - scores[sample["target"][row, column]]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert size == 4


def test_router_terms_act_in_training_only_and_are_logged_always():
    model, sample = toy_masked_lm(), toy_masked_sample([7, 4])
    expected, _, _ = plain()(model.eval(), sample)
    loss, _, logged = build()(model, sample)
    torch.testing.assert_close(loss, expected)
    assert logged["router_loss"] > 0
    assert logged["_load_encoder-self_1"].sum() == 2 * (9 + 6)  # K of each real token


def test_a_dense_model_has_no_router_terms():
    model, sample = toy_masked_lm("dense_masked_lm").train(), toy_masked_sample([7, 4])
    expected, _, _ = plain()(model, sample)
    loss, _, logged = build()(model, sample)
    torch.testing.assert_close(loss, expected)
    assert "router_loss" not in logged


def test_a_batch_without_a_masked_token_gives_no_gradient():
    model, sample = toy_masked_lm().train(), toy_masked_sample([3], masked=0)
    loss, size, _ = build()(model, sample)
    loss.backward()
    assert size == 0 and loss.item() == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_metrics_are_means_over_masked_tokens():
    model, criterion = toy_masked_lm().train(), build(0.5, 0.25)
    samples = [toy_masked_sample([7, 4]), toy_masked_sample([6, 5, 4], masked=3)]
    outputs = [criterion(model, sample)[2] for sample in samples]
    sizes = [4, 9]
    with metrics.aggregate() as meters:
        MaskedLMWithRouterLoss.reduce_metrics(outputs)
    values = meters.get_smoothed_values()
    loss = sum(output["loss"].item() for output in outputs) / 13 / math.log(2)
    assert values["loss"] == pytest.approx(loss, abs=1e-3)
    assert values["ppl"] == pytest.approx(2**loss, rel=2e-3)
    terms = [output["router_loss"].item() / size for output, size in zip(outputs, sizes)]
    expected = (4 * terms[0] + 9 * terms[1]) / 13
    assert values["router_loss"] == pytest.approx(expected, abs=1e-4)
    assert {"load_cv_encoder_self", "routing_entropy_encoder_self"} <= values.keys()
    assert MaskedLMWithRouterLoss.logging_outputs_can_be_summed()


def test_negative_weights_are_refused():
    with pytest.raises(UsageError, match="--router-z-weight -1"):
        build(beta=-1.0)
