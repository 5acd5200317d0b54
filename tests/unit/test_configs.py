"""Each YAML of an experiment and its shell recipe mean the same settings."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from argparse import Namespace
from dataclasses import fields, is_dataclass

import hydra
import pytest
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, omegaconf_no_object_check
from fairseq.models.transformer import TransformerConfig
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from moa_fairseq.cli import wmt14_train_command
from moa_fairseq.models.config import dense_transformer_config, transformer_config
from moa_fairseq.recipes.wmt14 import RECALLED, TRAINING

from ..paths import ROOT

EXPERIMENTS = [
    (f"wmt14_{pair.replace('-', '_')}_{size}{suffix}", pair, size, model)
    for pair in ("en-de", "en-fr")
    for size in ("base", "big")
    for suffix, model in (("", "moa_transformer"), ("_dense", "transformer"))
]
GROUPS = (
    *("common", "dataset", "optimization", "checkpoint", "task", "criterion", "optimizer"),
    *("lr_scheduler", "bmuf", "ema", "tokenizer", "bpe"),
)
# What the user gives to each, where the plugin lies, and the devices that each finds.
GIVEN = {
    *(("task", "data"), ("checkpoint", "save_dir"), ("common", "user_dir")),
    ("bmuf", "distributed_world_size"),
}


def from_shell(tmp_path, capsys, pair, size, model):
    """The settings of what `train_wmt14.sh --gpus 8 --dry-run` prints."""
    source_lang, target_lang = pair.split("-")
    manifest = {"options": {"source_lang": source_lang, "target_lang": target_lang}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dict.en.txt").touch()
    wmt14_train_command.main(
        [
            *("--prepared", str(tmp_path), "--save-dir", "checkpoints", "--pair", pair),
            *("--size", size, "--model", model, "--gpus", "8", "--dry-run"),
        ]
    )
    words = shlex.split(capsys.readouterr().out)
    arguments = words[words.index("fairseq-train") + 1 :]
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    return convert_namespace_to_omegaconf(args)


def from_yaml(name, overrides=()):
    """The settings of `fairseq-hydra-train --config-name NAME`, made as that command does."""
    if not hasattr(hydra, "compose"):
        pytest.skip("the files in configs/ need hydra 1.1 or later; fairseq 0.12.2 pins 1.0")
    GlobalHydra.instance().clear()
    hydra_init(name)
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.1"):
        cfg = hydra.compose(name, overrides=["task.data=data", *overrides])
    add_defaults(cfg)
    with omegaconf_no_object_check():
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def leaves(group, cfg):
    """Every field of a group by its path; a text that holds Python data is that data."""
    found = {}
    for name, value in OmegaConf.to_container(OmegaConf.create({group: cfg}))[group].items():
        if isinstance(value, str) and value.startswith(("(", "[")):
            value = list(map(float, re.findall(r"[0-9.]+", value)))
        found[group, name] = value
    return found


def model_leaves(cfg):
    """The sizes of a model as fairseq builds it: shell and YAML name the dense one differently."""
    if cfg._name.startswith("moa_"):
        return leaves("model", cfg)
    if isinstance(cfg, Namespace):  # fairseq's own, which fills gaps with defaults of its own
        return nested_leaves(TransformerConfig.from_namespace(cfg))
    return nested_leaves(dense_transformer_config(cfg))


def nested_leaves(cfg, *path):
    found = {}
    for known in fields(cfg):
        value = getattr(cfg, known.name)
        if is_dataclass(value):
            found.update(nested_leaves(value, *path, known.name))
        elif known.name != "_name":
            found[("model", *path, known.name)] = value
    return found


def settings(cfg):
    return {**model_leaves(cfg.model), **settings_but_model(cfg)}


def settings_but_model(cfg):
    found = {}
    for group in GROUPS:
        found.update({} if cfg.get(group) is None else leaves(group, cfg[group]))
    return found


def differences(shell, yaml):
    first, second = settings(shell), settings(yaml)
    return {
        path: (first.get(path, "missing"), second.get(path, "missing"))
        for path in {*first, *second} - GIVEN
        if first.get(path, "missing") != second.get(path, "missing")
    }


@pytest.mark.parametrize("name,pair,size,model", EXPERIMENTS, ids=[e[0] for e in EXPERIMENTS])
def test_yaml_and_shell_mean_the_same(tmp_path, capsys, name, pair, size, model):
    shell, yaml = from_shell(tmp_path, capsys, pair, size, model), from_yaml(name)
    assert differences(shell, yaml) == {}
    assert 8 * yaml.dataset.max_tokens * yaml.optimization.update_freq[0] == 262144
    text = (ROOT / f"configs/{name}.yaml").read_text(encoding="utf-8")
    assert ("recalled" in text) == (TRAINING[pair, size].source == RECALLED)
    # The command in its first lines is the one that it was compared with.
    flags = "" if model == "moa_transformer" else f" --model {model}"
    assert f"scripts/train_wmt14.sh --pair {pair} --size {size}{flags}\n" in text


MASKED_LM = {
    "8K8E128D": "52.44M",
    "8K8E256D": "61.89M",
    "8K16E256D": "78.75M",
    "8K32E256D": "112.47M",
    "8K64E256D": "179.91M",
    "dense": "51.34M",
}


def from_masked_lm_shell(tmp_path, model):
    """The settings of what `train_masked_lm.sh --gpus 8 --dry-run` prints."""
    (tmp_path / "dict.txt").touch()
    command = ["bash", ROOT / "scripts/train_masked_lm.sh", "--data", tmp_path, "--save-dir", "x"]
    command += ["--model", model, "--gpus", "8", "--dry-run"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = shlex.split(printed)
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, words[words.index("fairseq-train") + 1 :])
    return convert_namespace_to_omegaconf(args)


@pytest.mark.parametrize("model", ["8K64E256D", "dense"])
def test_yaml_and_shell_of_masked_language_models_mean_the_same(tmp_path, model):
    shell, yaml = from_masked_lm_shell(tmp_path, model), from_yaml(f"masked_lm_{model.lower()}")
    first, second = (
        {**settings_but_model(cfg), **leaves("model", cfg.model)} for cfg in (shell, yaml)
    )
    assert {
        path for path in {*first, *second} - GIVEN if first.get(path) != second.get(path)
    } == set()
    assert 8 * yaml.dataset.max_tokens * yaml.optimization.update_freq[0] == 524288


def test_masked_language_models_differ_in_their_experts_alone():
    def without_experts(name):
        cfg = OmegaConf.load(ROOT / f"configs/masked_lm_{name.lower()}.yaml")
        experts = f"{cfg.model.encoder_attention_heads}K{cfg.model.num_experts}E"
        assert f"{experts}{cfg.model.head_dim}D" == name
        del cfg.model.num_experts, cfg.model.head_dim
        return OmegaConf.to_container(cfg, resolve=False)

    names = [name for name in MASKED_LM if name != "dense"]
    assert all(without_experts(name) == without_experts("8K64E256D") for name in names)
    for name, parameters in MASKED_LM.items():
        text = (ROOT / f"configs/masked_lm_{name.lower()}.yaml").read_text(encoding="utf-8")
        assert (
            f"has {parameters} parameters" in text and "recalled and not read in a source" in text
        )
        assert f"scripts/train_masked_lm.sh --model {name}\n" in text
    found = {path.stem for path in (ROOT / "configs").glob("masked_lm_*.yaml")}
    assert found == {f"masked_lm_{name.lower()}" for name in MASKED_LM}


CHANGED = [
    ("common.seed=2", ("common", "seed")),
    ("common.fp16=false", ("common", "fp16")),
    ("task.target_lang=fr", ("task", "target_lang")),
    ("model.activation_dropout=0.2", ("model", "activation_dropout")),
    ("model.share_all_embeddings=false", ("model", "share_all_embeddings")),
    ("+model.encoder_embed_dim=256", ("model", "encoder", "embed_dim")),
    ("criterion.label_smoothing=0.2", ("criterion", "label_smoothing")),
    ('optimizer.adam_betas="(0.9,0.999)"', ("optimizer", "adam_betas")),
    ("optimizer.adam_eps=1e-8", ("optimizer", "adam_eps")),
    ("lr_scheduler.warmup_updates=8000", ("lr_scheduler", "warmup_updates")),
    ("dataset.max_tokens=4096", ("dataset", "max_tokens")),
    ("optimization.lr=[5e-4]", ("optimization", "lr")),
    ("optimization.update_freq=[8]", ("optimization", "update_freq")),
    ("checkpoint.keep_last_epochs=5", ("checkpoint", "keep_last_epochs")),
]


@pytest.mark.parametrize("suffix,model", [("", "moa_transformer"), ("_dense", "transformer")])
def test_a_change_in_one_of_them_shows(tmp_path, capsys, suffix, model):
    shell = from_shell(tmp_path, capsys, "en-de", "base", model)
    for override, path in CHANGED:
        if suffix == "":
            path = ("model", "encoder_embed_dim") if "embed_dim" in path else path
        assert path in differences(shell, from_yaml(f"wmt14_en_de_base{suffix}", [override]))


def test_every_experiment_has_its_yaml():
    found = {path.stem for path in (ROOT / "configs").glob("wmt14_*.yaml")}
    assert found == {name for name, *_ in EXPERIMENTS}


def test_every_run_of_the_sweep_can_be_built_and_has_its_own_folder():
    folders = set()
    params = OmegaConf.load(ROOT / "configs/sweep_experts.yaml").hydra.sweeper.params
    grid = [[f"{name}={value}" for value in text.split(",")] for name, text in params.items()]
    runs = list(itertools.product(*grid))
    assert len(runs) > 1
    for overrides in runs:
        cfg = from_yaml("sweep_experts", overrides)
        moa = transformer_config(cfg.model).moa  # raises where K is more than E
        selected = {cfg.model.encoder_attention_heads, cfg.model.decoder_attention_heads}
        assert {f"{k}K{moa.num_experts}E{moa.head_dim}D-seed1" for k in selected} == {
            cfg.checkpoint.save_dir.split("/")[-1]
        }
        folders.add(cfg.checkpoint.save_dir)
    assert len(folders) == len(runs)
