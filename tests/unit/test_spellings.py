from __future__ import annotations

import argparse

import pytest
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.cli.profile import build
from moa_fairseq.errors import UsageError
from moa_fairseq.models.moa_transformer import NAMED_VARIANTS

CRITERIA = ("moa_ce_loss", "label_smoothed_cross_entropy_with_router_loss")


def parse(*arguments, arch="moa_transformer_base", criterion="moa_ce_loss"):
    parser = options.get_training_parser()
    arguments = ["data", "--arch", arch, "--criterion", criterion, *arguments]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("arch", ["moa_transformer", *NAMED_VARIANTS])
def test_the_authors_spellings_mean_our_options(arch, criterion):
    theirs = ["--num-expert", "24", "--gating", "noisy", "--ffd-type", "moe"]
    theirs += ["--cvloss", "0.5", "--switchloss", "0.25", "--zloss", "0.125"]
    ours = ["--num-experts", "24", "--router-noise", "--ffn-type", "moe"]
    ours += ["--load-cv-squared-weight", "0.5"]
    ours += ["--load-balance-weight", "0.25", "--router-z-weight", "0.125"]
    found, expected = (parse(*flags, arch=arch, criterion=criterion) for flags in (theirs, ours))
    assert found == expected
    assert found.model.num_experts == 24
    assert found.model.router_noise
    assert found.criterion.load_balance_weight == 0.25
    assert parse(arch=arch, criterion=criterion) != expected


def test_without_a_flag_defaults_stay():
    assert parse().model.num_experts == 8
    assert parse(arch="moa_transformer_big").model.num_experts == 32
    assert not parse().model.router_noise
    assert not parse("--gating", "normal").model.router_noise
    cfg = parse(criterion="label_smoothed_cross_entropy_with_router_loss")
    assert cfg.criterion.load_balance_weight == 0.01
    assert cfg.criterion.router_z_weight == 0.001


DIFFERENT = [
    ("--num-expert 8 --num-experts 16", "--num-expert 8 and --num-experts 16"),
    ("--num-experts 16 --num-expert 8", "--num-experts 16 and --num-expert 8"),
    ("--ffd-type moe --ffn-type normal", "--ffd-type moe and --ffn-type normal"),
    ("--zloss 0.1 --router-z-weight 0.2", "--zloss 0.1 and --router-z-weight 0.2"),
    ("--switchloss 1 --load-balance-weight 0", "--switchloss 1.0 and --load-balance-weight 0.0"),
    ("--cvloss 1 --load-cv-squared-weight 2", "--cvloss 1.0 and --load-cv-squared-weight 2.0"),
    ("--gating normal --router-noise", "--gating normal and --router-noise"),
    ("--router-noise --gating normal", "--router-noise and --gating normal"),
]


@pytest.mark.parametrize("flags,message", DIFFERENT, ids=[flags for flags, _ in DIFFERENT])
def test_two_spellings_with_different_values_are_refused(flags, message):
    with pytest.raises(UsageError) as error:
        parse(*flags.split())
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_two_spellings_with_one_value_and_one_spelling_twice_are_accepted():
    assert parse("--num-expert", "9", "--num-experts", "9").model.num_experts == 9
    assert parse("--num-expert", "9", "--num-expert", "10").model.num_experts == 10
    assert parse("--router-noise", "--gating", "noisy").model.router_noise
    # One parser serves several command lines.
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY["moa_transformer"].add_args(parser)
    for flags, expected in ((["--num-expert", "9"], 9), (["--num-experts", "11"], 11)):
        assert parser.parse_args(flags).num_experts == expected


def test_wrong_values_and_abbreviations_are_refused(capsys):
    for flags in (("--gating", "loud"), ("--num-exper", "8"), ("--switchlos", "1")):
        with pytest.raises(SystemExit):
            parse(*flags)
        assert flags[0] in capsys.readouterr().err


def test_the_help_says_whose_spelling_it_is():
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY["moa_transformer_base"].add_args(parser)
    CRITERION_REGISTRY["moa_ce_loss"].add_args(parser)
    text = " ".join(parser.format_help().split())
    for spelling in ("--num-expert", "--switchloss", "--zloss", "--cvloss"):
        assert f"(in the authors' code {spelling})" in text
    assert "--gating {normal,noisy}" in text


def test_moa_profile_knows_them():
    model = build("moa_transformer_tiny", 50, ["--num-expert", "16"])
    assert model.encoder.layers[0].self_attn.q_experts.weight.shape[0] == 16
