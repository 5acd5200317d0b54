"""Whatever the options are: a model that trains, or one line on what is wrong with them."""

from __future__ import annotations

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from moa_fairseq.errors import UsageError
from moa_fairseq.models.config import MoATransformerConfig
from moa_fairseq.models.dense_transformer import DenseTransformerModel, FlatTransformerConfig
from moa_fairseq.models.moa_transformer import MoATransformerModel

from ..toy import SMALL, toy_sample, toy_task

PROBABILITY = st.sampled_from([0.0, 0.0, 0.1, 1.0, 1.5, -0.1, float("nan")])
SIZE = st.sampled_from([16, 16, 16, 8, 12, 1, 0, -4])
NUMBER = st.integers(-1, 5)
FLAG = st.booleans()
FAIRSEQ = {
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), PROBABILITY),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), PROBABILITY),
    **dict.fromkeys(("encoder_embed_dim", "encoder_ffn_embed_dim"), SIZE),
    **dict.fromkeys(
        ("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_output_dim", "decoder_input_dim"),
        st.none() | st.none() | SIZE,
    ),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), st.integers(-1, 2)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), NUMBER),
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before"), FLAG),
    **dict.fromkeys(("encoder_learned_pos", "decoder_learned_pos"), FLAG),
    **dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), FLAG),
    **dict.fromkeys(("layernorm_embedding", "no_token_positional_embeddings"), FLAG),
    **dict.fromkeys(("no_scale_embedding", "checkpoint_activations"), FLAG),
    **dict.fromkeys(("no_cross_attention", "cross_self_attention"), FLAG),
    "activation_fn": st.sampled_from(["relu", "gelu", "tanh"]),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), st.sampled_from([64, 0])),
    **dict.fromkeys(
        ("encoder_layers_to_keep", "decoder_layers_to_keep"),
        st.sampled_from([None, None, "0", "0,1", "1,1", "2", "x", "-1"]),
    ),
    "quant_noise_pq": st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    "quant_noise_pq_block_size": st.sampled_from([8, 1, 3, 0]),
}
MOA = {
    "num_experts": NUMBER,
    "head_dim": st.integers(-1, 3),
    "heads_per_expert": st.integers(0, 2),
    "gate_normalization": st.sampled_from(["detached", "none", "topk-softmax"]),
    "router_noise": FLAG,
    "sample_topk": NUMBER,
    "router_init_std": st.sampled_from([0.02, 0.5, 0.0, -1.0, float("nan")]),
    "output_init_gain": st.sampled_from([0.4, 1.0, 0.0, float("nan")]),
    "moa_modules": st.sampled_from(
        ["encoder-self,decoder-self,cross", "cross", "decoder-self, cross", "", "self", "cross,,"]
    ),
    "projection_bias": FLAG,
    "ffn_type": st.sampled_from(["normal", "moe"]),
    "ffn_num_experts": NUMBER,
    "ffn_num_selected": NUMBER,
}


def some_of(strategies):
    """A few options, so that not every example has a wrong one."""
    return st.sets(st.sampled_from(sorted(strategies)), max_size=7).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in sorted(names)})
    )


def build_and_train(model_class, config_class, options):
    """A step of training and one of validation, unless the options are refused in one line."""
    torch.manual_seed(1)
    task = toy_task()
    known = {name for name in SMALL if hasattr(config_class(), name)}
    small = {name: SMALL[name] for name in known}
    config = OmegaConf.structured(config_class(**{**small, **options}))
    try:
        model = model_class.build_model(config, task)
    except UsageError as error:
        event("refused")
        assert "\n" not in str(error) and "--" in str(error)
        return
    event("trained")
    sample = toy_sample(task, [3, 5], [4, 2])
    output, _ = model(**sample["net_input"])
    assert output.shape == (2, 5, len(task.target_dictionary))
    output.float().logsumexp(-1).sum().backward()
    model.eval()
    with torch.no_grad():
        assert model(**sample["net_input"])[0].isfinite().all()


@given(some_of({**FAIRSEQ, **MOA}))
def test_options_of_a_moa_model(options):
    build_and_train(MoATransformerModel, MoATransformerConfig, options)


@given(some_of(FAIRSEQ))
def test_options_of_a_dense_model(options):
    build_and_train(DenseTransformerModel, FlatTransformerConfig, options)
