from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaLMHead, RobertaModel
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from omegaconf import OmegaConf

from moa_fairseq.analysis.costs import count_parameters
from moa_fairseq.cli.profile import build
from moa_fairseq.errors import CheckpointMismatch, UsageError
from moa_fairseq.fast_path import HAS_FAST_PATH
from moa_fairseq.models.moa_transformer import MoATransformerEncoder
from moa_fairseq.modules.recording import moa_attentions, record_routings, routed_modules
from moa_fairseq.modules.transformer_layer import MoATransformerEncoderLayer

from ..toy_masked_lm import POSITIONS, SMALL, toy_masked_lm, toy_masked_sample, toy_masked_task

ARCHS = ("moa_masked_lm", "dense_masked_lm")


@pytest.mark.parametrize("arch", ARCHS)
def test_masked_tokens_are_projected_as_all_tokens_are(arch):
    model, sample = toy_masked_lm(arch).eval(), toy_masked_sample([7, 4])
    masked = sample["target"].ne(1)
    whole, _ = model(**sample["net_input"])
    some, _ = model(**sample["net_input"], masked_tokens=masked)
    assert whole.shape == (2, 9, 25) and some.shape == (4, 25)
    torch.testing.assert_close(some, whole[masked])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_padding_changes_nothing(arch, positions):
    model = toy_masked_lm(arch, positions=positions).eval()
    alone, padded = toy_masked_sample([5]), toy_masked_sample([5], extra_padding=3)
    with torch.no_grad():
        expected, _ = model(**alone["net_input"])
        output, _ = model(**padded["net_input"])
    torch.testing.assert_close(output[:, :7], expected, rtol=1e-4, atol=1e-5)


def test_the_encoder_is_the_translation_models():
    model = toy_masked_lm()
    encoder = model.encoder.sentence_encoder
    assert type(encoder) is MoATransformerEncoder
    assert {type(layer) for layer in encoder.layers} == {MoATransformerEncoderLayer}
    assert type(model.encoder.lm_head) is RobertaLMHead
    assert model.encoder.lm_head.weight is encoder.embed_tokens.weight
    assert [position for _, position, _ in moa_attentions(model)] == [0, 1]


def test_experts_keep_their_own_initialisation_and_the_rest_has_berts():
    model = toy_masked_lm(encoder_embed_dim=256, encoder_ffn_embed_dim=512, head_dim=64)
    layer = model.encoder.sentence_encoder.layers[0]
    deviations = {
        "k_proj": (layer.self_attn.k_proj.weight, 512**-0.5),
        "v_proj": (layer.self_attn.v_proj.weight, 512**-0.5),
        "fc1": (layer.fc1.weight, 0.02),
        "head": (model.encoder.lm_head.dense.weight, 0.02),
    }
    for name, (weight, expected) in deviations.items():
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("prenorm", [False, True])
def test_the_dense_twin_is_fairseqs_roberta(prenorm):
    dense = toy_masked_lm("dense_masked_lm", encoder_normalize_before=prenorm)
    torch.manual_seed(0)
    args = Namespace(
        **{name: value for name, value in SMALL.items() if name.startswith("encoder")},
        dropout=0.0,
        attention_dropout=0.0,
        max_positions=POSITIONS,
        encoder_layerdrop=0,
    )
    ARCH_CONFIG_REGISTRY["roberta_prenorm" if prenorm else "roberta"](args)
    roberta = RobertaModel.build_model(args, toy_masked_task())
    ours, theirs = dense.state_dict(), roberta.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
    sample = toy_masked_sample([7, 4])
    with torch.no_grad():
        output, expected = (each.eval()(**sample["net_input"])[0] for each in (dense, roberta))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_flag_turns_on_what_its_name_says(arch):
    """fairseq gives an option that is on by default a flag that turns it off."""
    parser = ArgumentParser(allow_abbrev=False, argument_default=SUPPRESS)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    assert vars(parser.parse_args([])) == {}  # so that defaults are those of the config class
    options = vars(MODEL_DATACLASS_REGISTRY[arch]())
    switches = [name for name, value in options.items() if isinstance(value, bool)]
    assert "untie_weights_roberta" in switches
    for name in switches:
        given = parser.parse_args(["--" + name.replace("_", "-")])
        assert vars(given) == {name: True}


# Counted by hand: 2·E·d·D + 2·d·D + E·d + biases of E·D + E·d + 2·D for each attention.
def parameters(experts, head_dim, types=50265, dim=512, ffn=2048, layers=8, positions=128):
    if experts:
        attention = 2 * experts * dim * head_dim + 2 * dim * head_dim + experts * dim
        attention += experts * (head_dim + dim) + 2 * head_dim
    else:
        attention = 4 * dim * dim + 4 * dim
    layer = attention + 2 * dim * ffn + ffn + dim + 4 * dim
    head = dim * dim + dim + 2 * dim + types
    return layers * layer + types * dim + (positions + 2) * dim + 2 * dim + head


# In millions; the figures that are recalled from the paper have the same digits but for the first,
# 52.45.
ROWS = [(8, 128, 52.44), (8, 256, 61.89), (16, 256, 78.75)]


@pytest.mark.parametrize(("experts", "head_dim", "millions"), ROWS)
def test_parameters_of_the_papers_models(experts, head_dim, millions):
    options = ["--projection-bias", "--num-experts", str(experts), "--head-dim", str(head_dim)]
    counted = count_parameters(build("moa_masked_lm", 50265, options, max_positions=128))
    assert counted == parameters(experts, head_dim)
    assert round(counted / 1e6, 2) == millions


def test_parameters_of_the_papers_transformer():
    if HAS_FAST_PATH:
        pytest.skip("this build of fairseq keeps a copy of the encoder's weights, and counts it")
    counted = count_parameters(build("dense_masked_lm", 50265, [], max_positions=128))
    assert counted == parameters(0, 0)
    assert round(counted / 1e6, 2) == 51.34


@pytest.mark.parametrize("arch", ARCHS)
def test_a_state_dict_goes_round(arch):
    first, second = toy_masked_lm(arch, seed=0), toy_masked_lm(arch, seed=1)
    second.load_state_dict(first.state_dict())
    sample = toy_masked_sample([7, 4])
    with torch.no_grad():
        outputs = [model.eval()(**sample["net_input"])[0] for model in (first, second)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_a_checkpoint_of_another_model_is_refused():
    model, other = toy_masked_lm(), toy_masked_lm(num_experts=3)
    with pytest.raises(CheckpointMismatch, match="not of this model"):
        model.load_state_dict(
            other.state_dict(), model_cfg=OmegaConf.create({"_name": "moa_masked_lm"})
        )


@pytest.mark.parametrize("options", [{}, {"ffn_type": "moe"}, {"encoder_normalize_before": True}])
def test_evaluation_runs_the_routed_modules(options):
    """A fused path around the attention, as in fairseq 0.12.2, would leave no routing."""
    model, fresh = toy_masked_lm(**options), toy_masked_lm(seed=1, **options)
    fresh.load_state_dict(model.state_dict())
    sample = toy_masked_sample([7, 4])
    fresh.eval()
    with torch.no_grad(), record_routings(fresh) as recorded:
        output, _ = fresh(**sample["net_input"])
    ran = [entry.name for entry in recorded]
    assert ran == [name for name, _, _ in routed_modules(model)]
    expected, _ = model.train()(**sample["net_input"])  # without dropout
    torch.testing.assert_close(output, expected.detach(), rtol=1e-4, atol=1e-5)


def test_routers_learn_with_checkpointed_activations():
    gradients = []
    for recomputed in (False, True):
        model = toy_masked_lm(checkpoint_activations=recomputed).train()
        model(**toy_masked_sample([7, 4])["net_input"])[0].square().sum().backward()
        weight = moa_attentions(model)
        gradients.append(torch.stack([attention.router.weight.grad for *_, attention in weight]))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(*gradients)


def test_the_model_has_the_positions_of_the_task_and_says_so():
    config = MODEL_DATACLASS_REGISTRY["moa_masked_lm"]()
    for name, value in SMALL.items():
        setattr(config, name, value)
    config = OmegaConf.structured(config)
    OmegaConf.set_struct(config, True)
    model = ARCH_MODEL_REGISTRY["moa_masked_lm"].build_model(config, toy_masked_task())
    assert config.max_positions == model.max_positions() == POSITIONS
    positions = model.encoder.sentence_encoder.embed_positions
    assert isinstance(positions, LearnedPositionalEmbedding)
    assert positions.num_embeddings == POSITIONS + 2


def test_positions_are_sinusoidal_where_asked():
    positions = toy_masked_lm(positions="sinusoidal").encoder.sentence_encoder.embed_positions
    assert isinstance(positions, SinusoidalPositionalEmbedding)


def test_a_classification_head_can_be_trained():
    model = toy_masked_lm()
    model.register_classification_head("pair", num_classes=3)
    sample = toy_masked_sample([7, 4])
    logits, _ = model(**sample["net_input"], classification_head_name="pair")
    assert logits.shape == (2, 3)
    fresh = toy_masked_lm(seed=1, load_checkpoint_heads=True)
    state = model.state_dict()
    fresh.upgrade_state_dict(state)
    fresh.load_state_dict(state)
    with torch.no_grad():
        other, _ = fresh(**sample["net_input"], classification_head_name="pair")
    torch.testing.assert_close(other, logits.detach())


REFUSED = [
    ({"num_experts": 1}, "--num-experts 1 is fewer than --encoder-attention-heads 2"),
    ({"max_positions": 5}, "--tokens-per-sample 12 is more than --max-positions 5"),
    ({"dropout": 1.5}, "--dropout 1.5: it must lie between 0 and 1"),
    ({"pooler_dropout": -1.0}, "--pooler-dropout -1.0"),
    ({"encoder_layers": -1}, "--encoder-layers -1"),
    ({"positions": "rotary"}, "--positions rotary: give one of learned, sinusoidal, none"),
    ({"sample_topk": 3}, "--sample-topk 3"),
    ({"router_init_std": 0.0}, "--router-init-std 0.0"),
    ({"arch": "dense_masked_lm", "encoder_attention_heads": 3}, "does not divide"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED, ids=str)
def test_options_that_cannot_work_are_refused(options, line):
    with pytest.raises(UsageError, match=line) as refused:
        toy_masked_lm(**options)
    assert "\n" not in str(refused.value) and "decoder" not in str(refused.value)
