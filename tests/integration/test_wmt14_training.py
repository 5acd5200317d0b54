"""The WMT14 recipes through the real commands, on a toy corpus and the CPU."""

from __future__ import annotations

import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from moa_fairseq.checkpoints import load_checkpoint

from ..paths import ROOT
from .commands import BIN, last_line, run, script, train_losses

TINY = [
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64", "--encoder-layers", "1"),
    *("--decoder-layers", "1", "--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
    *("--log-interval", "1", "--warmup-updates", "10"),
]
SMALL_BATCHES = ["--max-tokens", "512", "--update-freq", "1"]


def train(toy, save_dir, *extra, options=(), **keywords):
    """Run train_wmt14.sh on the toy corpus; `options` go before --, `extra` after."""
    return script(
        "train_wmt14.sh",
        *("--prepared", toy / "prepared", "--save-dir", save_dir, "--pair", "en-de"),
        *("--size", "base", *options, "--", *TINY, *extra),
        **keywords,
    )


def losses(result):
    return train_losses(result.stdout + result.stderr)


@pytest.fixture(scope="module")
def six_updates(toy, tmp_path_factory):
    """Losses and folder of six updates of the recipe, with small batches."""
    save_dir = tmp_path_factory.mktemp("six")
    found = losses(train(toy, save_dir, *SMALL_BATCHES, "--max-update", "6"))
    assert len(found) == 6
    return found, save_dir


def test_training_follows_the_recipe_and_resumes(toy, six_updates, tmp_path):
    expected, save_dir = six_updates
    cfg = load_checkpoint(save_dir / "checkpoint_last.pt")["cfg"]
    assert (cfg["model"]["_name"], cfg["model"]["dropout"]) == ("moa_transformer_base", 0.2)
    assert (cfg["model"]["num_experts"], cfg["model"]["head_dim"]) == (8, 128)
    assert (cfg["checkpoint"]["keep_last_epochs"], cfg["optimization"]["lr"]) == (10, [7e-4])
    assert (save_dir / "checkpoint_best.pt").exists()
    assert (save_dir / ".data-checksum").exists()
    first = losses(train(toy, tmp_path, *SMALL_BATCHES, "--max-update", "3"))
    second = losses(train(toy, tmp_path, *SMALL_BATCHES, "--max-update", "6"))
    assert first + second == expected


def test_an_epoch_smaller_than_a_step_is_one_step(toy, tmp_path):
    # The toy corpus has far fewer than 262,144 tokens; what overrides the recipe comes last.
    result = train(toy, tmp_path, "--max-update", "2", options=["--max-tokens", "1024"])
    assert "1 × 1024 tokens × --update-freq 256 = 262144 tokens a step, fp32" in result.stderr
    sentences = re.findall(r"train_inner \| .*? bsz=([0-9]+)", result.stdout + result.stderr)
    assert sentences == ["3000", "3000"]


def test_the_ten_last_epochs_and_the_best_stay(toy, tmp_path):
    train(toy, tmp_path, "--max-epoch", "12", options=["--max-tokens", "4096"])
    kept = sorted(
        int(match[1])
        for path in tmp_path.glob("*.pt")
        if (match := re.fullmatch(r"checkpoint(\d+)\.pt", path.name))
    )
    assert kept == list(range(3, 13))
    assert (tmp_path / "checkpoint_best.pt").exists()


def test_yaml_and_shell_train_to_the_same_losses(toy, six_updates, tmp_path):
    expected, _ = six_updates
    result = run(
        *("fairseq-hydra-train", "--config-dir", "configs", "--config-name", "wmt14_en_de_base"),
        *(f"task.data={toy / 'prepared/data'}", f"checkpoint.save_dir={tmp_path}"),
        *("common.cpu=true", "common.fp16=false", "common.log_interval=1"),
        *("+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=64"),
        *("+model.encoder_layers=1", "+model.decoder_layers=1"),
        *("+model.encoder_attention_heads=4", "+model.decoder_attention_heads=4"),
        *("lr_scheduler.warmup_updates=10", "dataset.max_tokens=512"),
        *("optimization.update_freq=[1]", "optimization.max_update=6"),
    )
    assert losses(result) == expected


def test_the_dense_baseline_is_fairseqs_transformer_on_both_ways(toy, six_updates, tmp_path):
    arguments = [*SMALL_BATCHES, "--max-update", "4"]
    dense = ["--model", "transformer"]
    stock = losses(train(toy, tmp_path / "stock", *arguments, options=dense))
    ours = losses(
        train(toy, tmp_path / "ours", *arguments, "--arch", "dense_transformer", options=dense)
    )
    assert ours == stock
    assert stock != six_updates[0][:4]
    states = [load_checkpoint(tmp_path / name / "checkpoint_last.pt") for name in ("stock", "ours")]
    assert list(states[0]["model"]) == list(states[1]["model"])
    assert states[0]["cfg"]["criterion"]["_name"] == "label_smoothed_cross_entropy"


@pytest.fixture(scope="module")
def fairseq_train_without_gpus(tmp_path_factory):
    """A PATH whose fairseq-train takes the CPU for a GPU where it counts devices, and only there.

    fairseq divides by their number under torchrun; with it, the commands that start several
    workers can run here as they are printed.
    """
    folder = tmp_path_factory.mktemp("bin")
    path = folder / "fairseq-train"
    path.write_text(
        f"#!{sys.executable}\nimport torch\ntorch.cuda.device_count = lambda: 1\n"
        "from fairseq_cli.train import cli_main\ncli_main()\n"
    )
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "where",
    [["--gpus", "2"], ["--gpus", "1", "--nodes", "2", "--master", "127.0.0.1:{port}"]],
    ids=["one node", "two nodes"],
)
def test_printed_commands_train_two_workers_as_one(
    toy, tmp_path, unused_port, fairseq_train_without_gpus, where
):
    common = [
        *("--max-tokens", "512", "--max-update", "3", "--dropout", "0"),
        *("--attention-dropout", "0", "--activation-dropout", "0"),
    ]
    expected = losses(train(toy, tmp_path / "one", *common, "--update-freq", "2"))
    gloo = ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    printed = train(
        *(toy, tmp_path / "two", *common, "--update-freq", "1", *gloo),
        options=[
            *(word.format(port=unused_port) for word in where),
            *("--precision", "fp32", "--dry-run"),
        ],
    ).stdout.splitlines()
    assert len(printed) == (2 if "--nodes" in where else 1)
    assert not (tmp_path / "two").exists()
    keywords = {"variables": fairseq_train_without_gpus, "timeout": 300}
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(run, *shlex.split(line), **keywords) for line in printed]
    logs = [result.stdout + result.stderr for result in (node.result() for node in nodes)]
    found = [loss for log in logs for loss in train_losses(log)]
    assert len(found) == 3
    assert [float(loss) for loss in found] == pytest.approx(
        [float(loss) for loss in expected], abs=0.002
    )


def test_a_sweep_trains_each_run_in_its_folder_and_resumes(toy, tmp_path):
    def sweep(folder, experts, epochs):
        result = run(
            *("fairseq-hydra-train", "--multirun", "--config-dir", ROOT / "configs"),
            *("--config-name", "sweep_experts", f"task.data={toy / 'prepared/data'}"),
            *("common.cpu=true", "common.log_interval=1", "model.encoder_embed_dim=32"),
            *("model.encoder_layers=1", "model.decoder_layers=1", "dataset.max_tokens=4096"),
            *("model.encoder_attention_heads=2", "model.head_dim=8"),
            *(f"model.num_experts={experts}", f"optimization.max_epoch={epochs}"),
            cwd=tmp_path,
            variables={"MOA_SWEEP_DIR": str(tmp_path / folder)},
        )
        return losses(result)

    both = sweep("both", "4,8", 1)
    folders = {path.parent.name for path in (tmp_path / "both").glob("*/checkpoint_last.pt")}
    assert folders == {"2K4E8D-seed1", "2K8E8D-seed1"}
    for name in folders:
        cfg = load_checkpoint(tmp_path / "both" / name / "checkpoint_last.pt")["cfg"]["model"]
        assert f"{cfg['encoder_attention_heads']}K{cfg['num_experts']}E" in name
    # The second run is not changed by the first, with which it shares a process.
    alone = sweep("alone", "8", 2)
    updates = len(both) // 2
    assert len(alone) == 2 * updates > 0
    assert both[updates:] == alone[:updates]
    # Again, for longer: the one that is through ends at once, the other goes on.
    assert sweep("both", "4", 1) == []
    resumed = sweep("both", "4,8", 2)
    assert len(resumed) == 2 * updates
    assert resumed[updates:] == alone[updates:]


def test_checkpoints_of_other_data_are_not_trained_on(toy, tmp_path):
    (tmp_path / ".data-checksum").write_text("1234 5")
    assert "trained on other data" in last_line(train(toy, tmp_path, check=False))


@pytest.fixture
def slurm(tmp_path):
    """A PATH with an srun that runs the command as each of two nodes in turn."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n'
    )
    (folder / "srun").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "--nodes=2 --ntasks=2 --ntasks-per-node=1" ] || exit 9\n'
        'shift 4\nfor node in 0 1; do SLURM_NODEID=$node "$@" || exit; done\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "41234567",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def test_slurm_starts_each_node_with_its_rank(toy, tmp_path, slurm):
    # As Slurm does it: a copy of the file, run elsewhere.
    copy = tmp_path / "slurm_script"
    copy.write_bytes((ROOT / "scripts/train_wmt14.slurm").read_bytes())
    arguments = [
        *("--prepared", toy / "prepared", "--save-dir", tmp_path / "a folder", "--pair", "en-de"),
        *("--size", "big", "--dry-run", "--", "--seed", "2"),
    ]
    printed = run("bash", copy, *arguments, variables=slurm, cwd=tmp_path).stdout.splitlines()
    assert len(printed) == 2
    for rank, line in enumerate(printed):
        words = shlex.split(line)
        assert words[: words.index("fairseq-train")] == [
            *("torchrun", "--nnodes", "2", "--node-rank", str(rank)),
            *("--master-addr", "node7", "--master-port", str(10000 + 41234567 % 20000)),
            *("--nproc-per-node", "4", "--no-python"),
        ]
        assert words[words.index("--update-freq") + 1] == "8"  # 8 workers × 4096 × 8
        assert words[words.index("--save-dir") + 1] == str(tmp_path / "a folder")
        assert words[-2:] == ["--seed", "2"]


def test_slurm_wrong_uses(tmp_path, slurm):
    path = ROOT / "scripts/train_wmt14.slurm"
    assert run("bash", path, "--help").stdout.startswith("usage: train_wmt14.slurm")
    outside = {"SLURM_JOB_ID": ""}
    assert run("bash", path, "--pair", "en-de", variables=outside, check=False).returncode == 2
    elsewhere = {**slurm, "SLURM_SUBMIT_DIR": str(tmp_path)}
    result = run("bash", path, "--pair", "en-de", variables=elsewhere, check=False)
    assert "submit from the repository" in last_line(result)
    # Only the account is missing from what a cluster needs.
    asked = re.findall(r"^#SBATCH --([a-z-]+)", path.read_text(), re.M)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time"} <= set(asked)
    assert "account" not in asked
