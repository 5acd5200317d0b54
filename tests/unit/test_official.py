from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.cli.import_official import main
from moa_fairseq.errors import UsageError
from moa_fairseq.models.moa_transformer import MoATransformerModel
from moa_fairseq.modules.moa_attention import MixtureOfAttentionHeads
from moa_fairseq.official import convert_parameters, import_state

from ..official import their_checkpoint
from ..paths import SHARED, reference_files
from ..toy import toy_sample, toy_task
from .test_reference import load as load_reference

PATH = Path("theirs.pt")
OFFICIAL = SHARED / "reference/official_tiny/checkpoint.pt"


@pytest.mark.parametrize("path", reference_files(), ids=lambda path: path.stem)
def test_renamed_modules_compute_what_the_authors_code_computed(path):
    reference = load_reference(path)
    place = "decoder.layers.1.encoder_attn"
    theirs = {
        f"{place}.k_proj.weight": reference["k_proj"],
        f"{place}.v_proj.weight": reference["v_proj"],
        f"{place}.q_proj.w_gate": reference["gate"],
        f"{place}.q_proj.experts.w": reference["q_experts"],
        f"{place}.q_proj.output_experts.w": reference["o_experts"],
    }
    experts = reference["num_experts"]
    ours = convert_parameters(theirs, experts, PATH)
    module = MixtureOfAttentionHeads(
        reference["embed_dim"],
        reference["num_heads"],
        experts,
        reference["head_dim"],
        kind="cross",
        gate_normalization="none",
    )
    module.load_state_dict({name[len(place) + 1 :]: tensor for name, tensor in ours.items()})
    length = reference["query"].shape[0]
    causal = torch.full((length, length), float("-inf")).triu(1)
    output, _ = module(
        reference["query"],
        reference["key"],
        reference["key"],
        key_padding_mask=reference["key_padding_mask"],
        query_padding_mask=reference["query_padding_mask"],
        attn_mask=causal if reference.get("causal") else None,
    )
    torch.testing.assert_close(output, reference["output"], rtol=1e-5, atol=1e-5)


CHANGES = [
    {},
    {"old": True},
    {"gating": "noisy"},
    {"encoder_normalize_before": True},
    {"num_expert": 6, "encoder_layers": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_imported_model_computes_the_same(changes, tmp_path):
    state, expected = their_checkpoint(**changes)
    torch.save(state, tmp_path / "theirs.pt")
    main([str(tmp_path / "theirs.pt"), str(tmp_path / "new" / "ours.pt")])
    # As fairseq's commands load it.
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "new" / "ours.pt")], task=FakeTask()
    )
    sample = toy_sample(toy_task(), [3, 5], [4, 2])
    output, _ = model.eval()(**sample["net_input"])
    torch.testing.assert_close(output, expected.eval()(**sample["net_input"])[0])
    embeddings = [model.encoder.embed_tokens, model.decoder.embed_tokens]
    assert embeddings[0].weight is embeddings[1].weight
    assert cfg.criterion._name == "moa_ce_loss"
    weights = (
        cfg.criterion.load_balance_weight,
        cfg.criterion.router_z_weight,
        cfg.criterion.load_cv_squared_weight,
    )
    assert weights == (0.02, 0.003, 0)
    assert cfg.criterion.label_smoothing == 0.1
    assert cfg.common.user_dir is None


class FakeTask:
    def build_model(self, cfg, from_checkpoint=False):
        return MoATransformerModel.build_model(cfg, toy_task())


def test_what_fairseq_keeps_is_kept_less_the_optimizer():
    state, _ = their_checkpoint()
    imported = import_state(state, PATH)
    assert imported["last_optimizer_state"] is None
    assert imported["optimizer_history"][-1]["num_updates"] == 12
    assert imported["extra_state"] == {"train_iterator": {"epoch": 3}, "imported_from": PATH.name}
    assert imported["cfg"]["task"] == {"_name": "translation"}
    assert imported["cfg"]["common"]["seed"] == 7
    # The input stays as it was.
    assert state["cfg"]["common"]["user_dir"] == "somewhere/else"


def test_parameters_of_older_builds_that_hold_nothing_are_accepted():
    state, _ = their_checkpoint()
    for side in ("encoder", "decoder"):
        state["model"][f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    import_state(state, PATH)


def without(name):
    return lambda state: state["model"].pop(name)


def with_parameter(name, tensor):
    return lambda state: state["model"].update({name: tensor})


def with_option(name, value):
    return lambda state: setattr(state["cfg"]["model"], name, value)


def without_routers(state):
    for name in [name for name in state["model"] if ".q_proj." in name]:
        del state["model"][name]


WRONG = [
    (without_routers, "is not a checkpoint of the authors' code"),
    (with_parameter("encoder.layers.0.self_attn.router.weight", torch.ones(1)), "already"),
    (without("decoder.layers.1.encoder_attn.q_proj.w_gate"), "decoder.layers.1.encoder_attn"),
    (without("encoder.layers.1.fc1.weight"), "encoder.layers.1.fc1.weight"),
    (without("decoder.embed_tokens.weight"), "lacks decoder.embed_tokens.weight"),
    (with_parameter("encoder.layers.0.extra", torch.ones(2)), "encoder.layers.0.extra"),
    (with_parameter("encoder.layers.0.ffd.7.weight", torch.ones(2)), "ffd.7.weight"),
    (
        with_parameter("encoder.layers.0.ffd.0.weight", torch.ones(32, 16)),
        "encoder.layers.0.ffd.0.weight should be a second copy of encoder.layers.0.fc1.weight",
    ),
    (with_option("num_expert", 5), "does not fit its own options: size mismatch"),
    (with_option("num_expert", None), "num_expert"),
    (with_option("num_expert", "four"), "num_expert is 'four'"),
    (with_option("activation_fn", "swish9"), "no model can be built from its options"),
    (with_option("ffd_type", "moe"), "--ffd-type moe"),
    (with_option("encoder_attention_heads", 9), "--encoder-attention-heads 9"),
    (lambda state: state["cfg"].update(model=None), "no options of its model"),
]


@pytest.mark.parametrize("change,message", WRONG, ids=[message for _, message in WRONG])
def test_what_is_not_understood_is_refused(change, message, tmp_path):
    state, _ = their_checkpoint()
    change(state)
    torch.save(state, tmp_path / "theirs.pt")
    with pytest.raises(UsageError) as error:
        main([str(tmp_path / "theirs.pt"), str(tmp_path / "ours.pt")])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.pt"]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_files_are_refused_without_running_what_they_hold(tmp_path):
    state, _ = their_checkpoint()
    whole = tmp_path / "whole.pt"
    torch.save(state, whole)
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    torch.save({**state, "criterion": Hostile(tmp_path / "ran")}, tmp_path / "hostile.pt")
    for name, message in (
        ("half.pt", "not a readable checkpoint"),
        ("hostile.pt", "not safe to load"),
        ("none.pt", "no such checkpoint"),
    ):
        with pytest.raises(UsageError, match=message):
            main([str(tmp_path / name), str(tmp_path / "ours.pt")])
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "ours.pt").exists()
    with pytest.raises(UsageError, match="exists already"):
        main([str(whole), str(tmp_path / "half.pt")])


@pytest.mark.skipif(not OFFICIAL.exists(), reason=f"needs {OFFICIAL}")
def test_the_authors_checkpoint_is_wholly_understood(tmp_path):
    main([str(OFFICIAL), str(tmp_path / "ours.pt")])
    theirs, ours = load_checkpoint(OFFICIAL)["model"], load_checkpoint(tmp_path / "ours.pt")
    assert len(ours["model"]) == len(theirs) - 16  # four layers' second copies
    name = "decoder.layers.1.encoder_attn"
    torch.testing.assert_close(
        8 * ours["model"][f"{name}.o_experts.weight"], theirs[f"{name}.q_proj.output_experts.w"]
    )
    assert ours["cfg"]["model"]["num_experts"] == 8
    assert ours["cfg"]["model"]["gate_normalization"] == "none"
