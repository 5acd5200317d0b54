from __future__ import annotations

import pytest

from moa_fairseq.analysis.costs import count_parameters, linear_macs
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


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--arch", "moa", "--vocab-size", "10"], "--arch moa is not a translation Transformer"),
        (["--arch", "lstm", "--vocab-size", "10"], "--arch lstm is not a translation Transformer"),
        (["--arch", "transformer", "--vocab-size", "0"], "--vocab-size 0"),
        (["--arch", "transformer", "--vocab-size", "9", "--length", "0"], "--length 0"),
    ],
)
def test_wrong_use_is_named(arguments, message):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert message in str(error.value.code)
