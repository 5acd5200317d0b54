"""`dense_transformer` is fairseq's `transformer`, for hydra."""

from __future__ import annotations

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.compat import without_memory

from ..toy import toy_sample, toy_task

SIZES = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "24", "--encoder-layers", "2"),
    *("--decoder-layers", "1", "--encoder-attention-heads", "2", "--decoder-attention-heads", "4"),
]


def build(*arguments, seed=5):
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, ["data", *arguments])
    ).model
    torch.manual_seed(seed)
    task = toy_task()
    return ARCH_MODEL_REGISTRY[cfg._name].build_model(cfg, task), task


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--share-all-embeddings", "--dropout", "0.3", "--activation-dropout", "0.2"],
        ["--decoder-embed-dim", "8", "--encoder-normalize-before", "--layernorm-embedding"],
        ["--no-scale-embedding", "--decoder-learned-pos", "--activation-fn", "gelu"],
    ],
    ids=str,
)
def test_it_is_fairseqs_transformer(extra):
    models = []
    for arch in ("transformer", "dense_transformer"):
        model, task = build("--arch", arch, *SIZES, *extra)
        sample = toy_sample(task, [3, 5], [4, 2])
        model.train()
        torch.manual_seed(11)
        output = model(**sample["net_input"])[0]
        output.logsumexp(-1).sum().backward()
        models.append((model, output))
    (stock, expected), (dense, output) = models
    assert torch.equal(output, expected)
    assert list(dense.state_dict()) == list(stock.state_dict())
    gradients = dict(stock.named_parameters())
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, gradients[name]), name
        if gradients[name].grad is None:  # fairseq 0.12.2's copies for its fast path
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, gradients[name].grad), name


@pytest.mark.parametrize(
    "arch,stock",
    [
        ("dense_transformer", "transformer_wmt_en_de"),
        ("dense_transformer_big", "transformer_wmt_en_de_big"),
    ],
)
def test_sizes_are_fairseqs(arch, stock):
    one_layer = ["--encoder-layers", "1", "--decoder-layers", "1", "--share-all-embeddings"]
    with without_memory():
        models = [build("--arch", name, *one_layer)[0] for name in (arch, stock)]
    shapes = [{n: tuple(p.shape) for n, p in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]
    heads = [model.encoder.layers[0].self_attn.num_heads for model in models]
    assert heads[0] == heads[1]
    with without_memory():
        full = build("--arch", arch, "--share-all-embeddings")[0]
    assert (len(full.encoder.layers), len(full.decoder.layers)) == (6, 6)
