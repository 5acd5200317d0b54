from __future__ import annotations

import argparse
from argparse import Namespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.compat import without_memory
from moa_fairseq.errors import UsageError
from moa_fairseq.models.config import MoATransformerConfig, transformer_config
from moa_fairseq.models.moa_transformer import NAMED_VARIANTS, MoATransformerModel
from moa_fairseq.modules import expert_products, moa_attention, moe_feed_forward

from ..toy import toy_model, toy_sample, toy_task


def command_line(*arguments):
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, ["data", *arguments])
    ).model


# d, FFN, layers, K, E, D
EXPECTED = {
    "moa_transformer": (512, 2048, 6, 8, 8, 128),
    "moa_transformer_base": (512, 2048, 6, 8, 8, 128),
    "moa_transformer_big": (512, 2048, 6, 16, 32, 256),
    "moa_transformer_iwslt_de_en": (512, 1024, 6, 4, 8, 128),
    "moa_transformer_tiny": (128, 256, 2, 4, 8, 32),
}


def parameters_by_hand(dim, ffn, layers, experts, head_dim, vocabulary):
    attention = 2 * experts * dim * head_dim + 2 * dim * head_dim + experts * dim
    feed_forward = 2 * dim * ffn + ffn + dim
    encoder_layer = attention + feed_forward + 2 * 2 * dim
    decoder_layer = 2 * attention + feed_forward + 3 * 2 * dim
    return layers * (encoder_layer + decoder_layer) + vocabulary * dim


@pytest.mark.parametrize("arch", EXPECTED)
def test_named_architectures_mean_their_sizes_on_the_command_line(arch):
    flat = command_line("--arch", arch)
    cfg = transformer_config(flat)
    dim, ffn, layers, selected, experts, head_dim = EXPECTED[arch]
    for side in (cfg.encoder, cfg.decoder):
        assert (side.embed_dim, side.ffn_embed_dim, side.layers) == (dim, ffn, layers)
        assert side.attention_heads == selected
    assert (cfg.moa.num_experts, cfg.moa.head_dim) == (experts, head_dim)
    assert cfg.moa.heads_per_expert == 1
    assert cfg.moa.gate_normalization == "detached"
    assert not cfg.moa.projection_bias


def test_every_named_variant_is_an_architecture_of_fairseq():
    assert set(NAMED_VARIANTS) | {"moa_transformer"} == set(EXPECTED)
    assert set(EXPECTED) <= set(ARCH_MODEL_REGISTRY)


@pytest.mark.parametrize(
    "arch,millions", [("moa_transformer_base", 69.3), ("moa_transformer_big", 204.0)]
)
def test_parameters_of_the_papers_models(arch, millions):
    # V = 44,512 is the paper's English-French dictionary.
    dim, ffn, layers, _, experts, head_dim = EXPECTED[arch]
    by_hand = parameters_by_hand(dim, ffn, layers, experts, head_dim, 44512)
    assert round(by_hand / 1e6, 1) == millions
    flat = command_line("--arch", arch, "--share-all-embeddings", "--encoder-layers", "1")
    flat.decoder_layers = 1
    task = toy_task()
    with without_memory():
        model = ARCH_MODEL_REGISTRY[arch].build_model(flat, task)
    built = sum(parameter.numel() for parameter in model.parameters())
    words = len(task.source_dictionary)
    assert built == parameters_by_hand(dim, ffn, 1, experts, head_dim, words)


def test_options_override_a_named_architecture():
    flat = command_line(
        *("--arch", "moa_transformer_big", "--num-experts", "64", "--decoder-attention-heads", "4"),
        *("--encoder-embed-dim", "256", "--gate-normalization", "none", "--projection-bias"),
        *("--moa-modules", "cross", "--dropout", "0.3", "--encoder-layers-to-keep", "0,2"),
    )
    cfg = transformer_config(flat)
    assert cfg.moa.num_experts == 64
    assert cfg.moa.modules == ("cross",)
    assert cfg.moa.gate_normalization == "none"
    assert cfg.moa.projection_bias
    assert (cfg.encoder.attention_heads, cfg.decoder.attention_heads) == (16, 4)
    assert cfg.dropout == 0.3
    assert cfg.encoder.layers_to_keep == "0,2"
    # The decoder follows the encoder's size, as in fairseq's own architectures.
    assert (cfg.decoder.embed_dim, cfg.decoder.input_dim, cfg.decoder.output_dim) == (256,) * 3


WRONG = [
    ({"num_experts": 0}, "--num-experts 0"),
    ({"num_experts": 4}, "--num-experts 4 is fewer than --encoder-attention-heads 8"),
    (
        {"num_experts": 8, "decoder_attention_heads": 9},
        "--num-experts 8 is fewer than --decoder-attention-heads 9",
    ),
    ({"head_dim": 0}, "--head-dim 0"),
    ({"heads_per_expert": -1}, "--heads-per-expert -1"),
    ({"sample_topk": 9}, "--sample-topk 9"),
    ({"sample_topk": -1}, "--sample-topk -1"),
    ({"router_init_std": 0.0}, "--router-init-std 0.0"),
    ({"router_init_std": float("nan")}, "--router-init-std nan"),
    ({"output_init_gain": 0.0}, "--output-init-gain 0.0"),
    ({"moa_modules": ""}, "--moa-modules ''"),
    ({"moa_modules": "encoder"}, "encoder-self, decoder-self, cross"),
    ({"ffn_num_selected": 0}, "--ffn-num-selected 0"),
    (
        {"ffn_num_selected": 9},
        "--ffn-num-selected 9: it must lie between 1 and --ffn-num-experts 8",
    ),
    ({"encoder_attention_heads": 0}, "--encoder-attention-heads 0"),
    ({"encoder_xformers_att_config": "{}"}, "--encoder-xformers-att-config"),
]


@pytest.mark.parametrize("changes,message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_named(changes, message):
    with pytest.raises(UsageError) as error:
        transformer_config(MoATransformerConfig(**changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.code == str(error.value)


def test_heads_of_a_side_without_moa_are_not_limited_by_the_experts():
    cfg = transformer_config(
        MoATransformerConfig(num_experts=4, encoder_attention_heads=4, moa_modules="encoder-self")
    )
    assert cfg.decoder.attention_heads == 8


def test_a_namespace_with_missing_fields_gets_defaults():
    cfg = transformer_config(
        Namespace(
            **{k: v for k, v in vars(MoATransformerConfig()).items() if k != "encoder_layers"}
        )
    )
    assert cfg.encoder.layers == 6


def test_two_models_in_one_process_keep_their_own_sizes():
    small = toy_model(encoder_embed_dim=8)
    large = toy_model(encoder_embed_dim=32, num_experts=6)
    again = toy_model(encoder_embed_dim=8)
    assert large.decoder.layers[0].encoder_attn.q_experts.weight.shape == (6, 32, 8)
    shapes = [[tuple(p.shape) for p in model.parameters()] for model in (small, again)]
    assert shapes[0] == shapes[1]


# Each flag changes a result: training-mode output, or the parameters, of the same seed.
CHANGES = [
    {"num_experts": 6},
    {"head_dim": 4},
    {"heads_per_expert": 2},
    {"encoder_attention_heads": 3},
    {"gate_normalization": "none"},
    {"gate_normalization": "topk-softmax"},
    {"router_noise": True},
    {"sample_topk": 1},
    {"router_init_std": 1.5},
    {"output_init_gain": 1.0},
    {"moa_modules": "cross"},
    {"projection_bias": True},
    {"ffn_type": "moe"},
    {"quant_noise_pq": 0.3},
    {"encoder_normalize_before": True},
    {"cross_self_attention": True, "no_cross_attention": True},
    {"attention_dropout": 0.4},
    {"activation_dropout": 0.4},
    {"layernorm_embedding": True},
    {"activation_fn": "gelu"},
]


# As above, but with a mixture of feed-forwards before and after.
FFN_CHANGES = [
    {"ffn_num_experts": 5},
    {"ffn_num_selected": 3},
    {"gate_normalization": "none", "moa_modules": "cross"},
    {"encoder_ffn_embed_dim": 24},
    {"decoder_ffn_embed_dim": 24},
    {"activation_fn": "gelu"},
    {"activation_dropout": 0.4},
    {"relu_dropout": 0.4},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_changes_a_result(change):
    assert_changes_a_result({}, change)


@pytest.mark.parametrize("change", FFN_CHANGES, ids=str)
def test_every_option_of_the_feed_forward_changes_a_result(change):
    assert_changes_a_result({"ffn_type": "moe"}, change)


def assert_changes_a_result(common, change):
    task = toy_task()
    sample = toy_sample(task, [3, 5], [4, 2])

    def result(**options):
        model = toy_model(task, **{**common, **options}).train()
        torch.manual_seed(3)
        output = model(**sample["net_input"])[0]
        assert output.isfinite().all()
        output.square().sum().backward()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        return torch.cat((output.detach().flatten(), torch.stack(norms)))

    # A gate may differ in its gradient alone, and a bias that starts at zero too.
    before, after = result(), result(**change)
    assert before.shape != after.shape or not torch.allclose(before, after, rtol=1e-3, atol=1e-4)


def test_every_moa_option_has_a_flag_with_help():
    parser = argparse.ArgumentParser()
    MoATransformerModel.add_args(parser)
    helps = {flag: action.help for action in parser._actions for flag in action.option_strings}
    for name in MoATransformerConfig.__annotations__:
        flag = "--" + name.replace("_", "-")
        expected = MoATransformerConfig.__dataclass_fields__[name].metadata["help"]
        assert helps[flag].startswith(expected)


@pytest.mark.parametrize("backend", ["dense", "loop"])
def test_the_expert_backend_reaches_attention_and_feed_forward(monkeypatch, backend):
    used = []

    def dispatch(*arguments):
        used.append(arguments[-1])
        return original(*arguments)

    original = expert_products.dispatch
    for module in (moa_attention, moe_feed_forward):
        monkeypatch.setattr(module, "dispatch", dispatch)
    task = toy_task()
    model = toy_model(task, ffn_type="moe", expert_backend=backend)
    model(**toy_sample(task, [3, 5], [4, 2])["net_input"])
    assert used == [backend] * 10
