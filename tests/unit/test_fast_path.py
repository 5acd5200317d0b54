"""Evaluation computes what training computes, and with the attention that the model has.

fairseq 0.12.2 has a fast path of its own for encoder layers in evaluation, which knows nothing of
the layer's attention. Its conditions: a model whose parameters were loaded and that has not been
trained since, without gradients.
"""

from __future__ import annotations

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

from moa_fairseq.models.moa_transformer import NAMED_VARIANTS
from moa_fairseq.modules.recording import record_routings, routed_modules

from ..toy import toy_task

SIZES = {
    **{"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32, "encoder_layers": 2},
    **{"decoder_layers": 2, "head_dim": 8, "dropout": 0.0, "attention_dropout": 0.0},
    **{"activation_dropout": 0.0, "router_init_std": 0.5, "share_all_embeddings": True},
}
CASES = [
    *((arch, {}) for arch in ("moa_transformer", *NAMED_VARIANTS, "dense_transformer")),
    ("moa_transformer_tiny", {"activation_fn": "gelu"}),
    ("moa_transformer_tiny", {"encoder_normalize_before": True}),
    ("moa_transformer_tiny", {"moa_modules": "cross", "ffn_type": "moe"}),
]


def build(arch, options):
    torch.manual_seed(3)
    config = MODEL_DATACLASS_REGISTRY[arch]()
    for name, value in {**SIZES, **options}.items():
        if hasattr(config, name):  # fairseq's own Transformer has no routers
            setattr(config, name, value)
    return ARCH_MODEL_REGISTRY[arch].build_model(config, toy_task())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("arch", "options"), CASES, ids=str)
def test_evaluation_equals_training_without_dropout(arch, options, side):
    model = build(arch, options)
    fresh = build(arch, options)
    fresh.load_state_dict(model.state_dict())
    pad = model.encoder.padding_idx
    source = torch.tensor([[5, 6, 7, 8, 2], [9, 2, pad, pad, pad], [10, 11, 12, 2, pad]])
    if side == "left":
        source = torch.stack([row.roll(int(row.eq(pad).sum())) for row in source])
    inputs = {
        "src_tokens": source,
        "src_lengths": source.ne(pad).sum(1),
        "prev_output_tokens": torch.tensor([[2, 5, 6], [2, 7, pad], [2, 8, 9]]),
    }
    fresh.eval()
    with torch.no_grad(), record_routings(fresh) as routings:
        encoded = fresh.encoder(source, inputs["src_lengths"])["encoder_out"][0]  # [T, batch, d]
        output, _ = fresh(**inputs)
    ran = [routing.name for routing in routings]
    assert set(ran) == {name for name, _, _ in routed_modules(fresh)}

    model.train()
    expected = model.encoder(source, inputs["src_lengths"])["encoder_out"][0]
    expected_output, _ = model(**inputs)
    real = source.ne(pad).T
    assert encoded.shape == expected.shape
    torch.testing.assert_close(encoded[real], expected[real].detach(), atol=1e-5, rtol=1e-4)
    real = inputs["prev_output_tokens"].ne(pad)
    torch.testing.assert_close(output[real], expected_output[real].detach(), atol=1e-5, rtol=1e-4)


def test_parameters_are_the_same_in_every_build_of_fairseq():
    names = {name for name, _ in build("moa_transformer", {}).encoder.layers[0].named_parameters()}
    expected = {
        *("router.weight", "q_experts.weight", "o_experts.weight", "k_proj.weight"),
        "v_proj.weight",
    }
    norms = {
        f"{norm}.{kind}"
        for norm in ("self_attn_layer_norm", "final_layer_norm", "fc1", "fc2")
        for kind in ("weight", "bias")
    }
    assert names == {f"self_attn.{name}" for name in expected} | norms
