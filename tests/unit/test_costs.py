from __future__ import annotations

import pytest

from moa_fairseq.analysis.costs import (
    all_macs,
    count_parameters,
    counted_macs,
    linear_macs,
    torch_can_count,
)
from moa_fairseq.cli.profile import build, main
from moa_fairseq.fast_path import HAS_FAST_PATH

SHARED = ["--share-all-embeddings"]


@pytest.mark.parametrize(
    "arch,macs,parameters",
    [
        ("transformer", 604.2, 66.9),
        ("transformer_vaswani_wmt_en_de_big", 2089.3, 221.9),
        ("moa_transformer_base", 627.8, 69.3),
        ("moa_transformer_big", 1217.7, 204.0),
    ],
)
def test_costs_of_the_papers_models(arch, macs, parameters):
    if HAS_FAST_PATH and not arch.startswith("moa"):
        pytest.skip("this build of fairseq keeps a copy of the encoder's weights, and counts it")
    # Table 1 counts MACs at V = 32,000, and parameters with its dictionary of 44,512 types.
    assert round(linear_macs(build(arch, 32000, SHARED)) / 1e6, 1) == macs
    assert round(count_parameters(build(arch, 44512, SHARED)) / 1e6, 1) == parameters


def test_the_papers_table_is_printed(capsys):
    main(["--paper-table"])
    rows = [
        "| Transformer base | 66.9M | 604.2M |",
        "| Transformer big | 221.9M | 2089.3M |",
        "| MoA base, 8K8E128D | 69.3M | 627.8M |",
        "| MoA big, 16K32E256D | 204.0M | 1217.7M |",
    ]
    # fairseq 0.12.2 keeps copies of its own Transformer's weights, and counts them.
    first = 2 if HAS_FAST_PATH else 0
    assert capsys.readouterr().out.splitlines()[2 + first :] == rows[first:]


SMALL = [*SHARED, *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96")]
COUNTED = [
    ("transformer", [*SMALL, "--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "96"]),
    ("moa_transformer", SMALL),
    ("moa_transformer", [*SMALL, "--num-experts", "16", "--heads-per-expert", "2"]),
    ("moa_transformer", [*SMALL, "--moa-modules", "cross", "--projection-bias"]),
    ("moa_transformer", [*SMALL, "--ffn-type", "moe", "--ffn-num-experts", "5"]),
    ("roberta", [*SMALL[1:], "--encoder-attention-heads", "4"]),
    ("dense_masked_lm", SMALL[1:]),
    ("moa_masked_lm", SMALL[1:]),
    ("moa_masked_lm", [*SMALL[1:], "--num-experts", "16", "--projection-bias"]),
    ("moa_masked_lm", [*SMALL[1:], "--ffn-type", "moe", "--untie-weights-roberta"]),
]


@pytest.mark.skipif(not torch_can_count(), reason="torch before 2.3 does not count")
@pytest.mark.parametrize(("arch", "options"), COUNTED, ids=str)
@pytest.mark.parametrize("length", [1, 10, 37])
def test_the_formula_and_torchs_counter_agree(arch, options, length):
    model = build(arch, 100, options, max_positions=length, device="cpu")
    assert all_macs(model, length) == counted_macs(model, length) > linear_macs(model, length)


def test_options_and_lengths_count(capsys):
    sizes = ["--arch", "moa_transformer_tiny", "--vocab-size", "100"]
    main([*sizes, "--length", "1", "--num-experts", "16", "--heads-per-expert", "2", *SHARED])
    printed = capsys.readouterr().out
    # By hand: d 128, FFN 256, K 4, E 16, H·D 64, two layers a side with three attentions.
    attention = 2 * 4 * 128 * 64 + 2 * 128 * 64
    macs = 6 * attention + 4 * 2 * 128 * 256 + 100 * 128
    parameters = 6 * (2 * 16 * 128 * 64 + 2 * 128 * 64 + 16 * 128) + 100 * 128
    parameters += 4 * (2 * 128 * 256 + 256 + 128) + (2 * 2 + 2 * 3) * 2 * 128
    assert f"({parameters:,})" in printed
    assert f"{macs / 1e6:.1f}M" in printed


def test_a_masked_language_model_has_no_target(capsys):
    sizes = ["--arch", "moa_masked_lm", "--vocab-size", "100", "--length", "3"]
    sizes += ["--encoder-layers", "2", "--encoder-embed-dim", "64", "--head-dim", "16"]
    main([*sizes, "--encoder-ffn-embed-dim", "96", "--encoder-attention-heads", "2"])
    printed = capsys.readouterr().out
    # By hand: K 2, D 16, head d² + V·d.
    head = 64 * 64 + 100 * 64
    macs = 3 * (2 * (6 * 64 * 16 + 2 * 64 * 96) + head)
    assert f"linear MACs  {macs / 1e6:.1f}M  (3 tokens; {3 * head / 1e6:.1f}M of them" in printed


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--arch", "moa", "--vocab-size", "10"], "--arch moa is not a translation Transformer"),
        (["--arch", "lstm", "--vocab-size", "10"], "--arch lstm is not a translation Transformer"),
        (["--arch", "transformer", "--vocab-size", "0"], "--vocab-size 0"),
        (["--arch", "transformer", "--vocab-size", "9", "--length", "0"], "--length 0"),
        (["--arch", "transformer"], "--vocab-size is missing"),
        (["--paper-table", "--arch", "transformer"], "--paper-table stands alone"),
    ],
)
def test_wrong_use_is_named(arguments, message):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert message in str(error.value.code)
