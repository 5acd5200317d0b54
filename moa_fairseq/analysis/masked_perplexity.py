"""Masked perplexity of a masked language model, and how it was computed.

exp(−1/N · Σ ln p(x_t | text with some tokens masked)), over the N masked tokens of a split. Which
tokens these are follows from a seed, so that models are compared on the same ones.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from omegaconf import open_dict
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ..checkpoints import load_checkpoint
from ..errors import UsageError
from ..masked_lm_checks import check_mask_probabilities
from ..mistakes import one_line_for_mistakes
from ..resuming import options_of
from ..text.files import sha256
from ..text.scoring import RESAMPLES
from ..text.scoring import SEED as BOOTSTRAP_SEED
from ..versions import installed_versions

LEVEL = 0.95


@dataclass(frozen=True)
class Masking:
    """Which tokens are masked, and by what: fairseq's options of `masked_lm`, BERT's by default.

    Attributes:
        seed: with the number of a block, it decides which of its tokens are masked.
        mask_prob: share of tokens that are masked, 0 to 1, both excluded.
        leave_unmasked_prob: share of these that stay as they are.
        random_token_prob: share of these that a random type replaces.
    """

    seed: int = 1
    mask_prob: float = 0.15
    leave_unmasked_prob: float = 0.1
    random_token_prob: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what cannot mask.

        Raises:
            UsageError: naming flag, value and remedy.
        """
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}: it must not be negative")
        check_mask_probabilities(self.mask_prob, self.leave_unmasked_prob, self.random_token_prob)


@dataclass(frozen=True)
class BlockSums:
    """What a split's blocks of text add up to; every array has one entry for each block.

    Attributes:
        nats: −Σ ln p of the masked tokens.
        tokens: number of masked tokens.
        special_nats, special_tokens: of them, `<s>` and `</s>`, which are easily told.
        length: tokens of the block, masked or not.
    """

    nats: np.ndarray
    tokens: np.ndarray
    special_nats: np.ndarray
    special_tokens: np.ndarray
    length: np.ndarray


def load_masked_lm(path: Path, data: str, masking: Masking, cpu: bool) -> Tuple[nn.Module, Any]:
    """A model in evaluation mode, and the task that it was trained for, on other data and masks.

    Raises:
        UsageError: for a checkpoint that cannot be read, is not of a masked language model, or
            has another vocabulary.
    """
    state = load_checkpoint(path)
    task = options_of((state.get("cfg") or {}).get("task") or state.get("args"))
    name = task.get("_name") or task.get("task")
    if name != "masked_lm":
        raise UsageError(
            f"--path {path}: it was trained for the task {name}, not masked_lm; give a masked "
            "language model"
        )
    del state
    with one_line_for_mistakes():
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": data, **asdict(masking)}
        )
    with open_dict(task.cfg):
        # The seed of the checkpoint's own training may stand there in its place.
        task.cfg.update(asdict(masking))
    model = models[0].eval()
    if not cpu and torch.cuda.is_available():
        model = model.cuda()
    return model, task


def block_sums(model: Any, task: Any, subset: str, max_tokens: int) -> BlockSums:
    """Run a model over all blocks of a split.

    Args:
        model: a fairseq model in evaluation mode; it runs where its parameters are.
        task: fairseq's `masked_lm`.
        subset: name of the split.
        max_tokens: tokens of a batch; it changes nothing but time and memory.

    Raises:
        UsageError: for a split that is missing or empty, or a block longer than a batch.
    """
    with one_line_for_mistakes():
        task.load_dataset(subset)
        batches = task.get_batch_iterator(
            dataset=task.dataset(subset),
            max_tokens=max_tokens,
            max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions()),
            required_batch_size_multiple=1,
            seed=task.cfg.seed,
            epoch=1,
        ).next_epoch_itr(shuffle=False)
    blocks = len(task.dataset(subset))
    sums = {name: np.zeros(blocks) for name in BlockSums.__dataclass_fields__}
    seen = np.zeros(blocks, dtype=bool)
    dictionary = task.source_dictionary
    with torch.no_grad():
        for sample in tqdm(batches, desc=subset, unit=" batches", leave=False):
            identities = sample["id"].numpy()
            seen[identities] = True
            lengths = sample["net_input"]["src_tokens"].ne(dictionary.pad()).sum(dim=1)
            sums["length"][identities] = lengths.numpy()
            for row, nats, special in _masked_tokens(model, sample, dictionary):
                block = identities[row]
                sums["nats"][block] += nats
                sums["tokens"][block] += 1
                sums["special_nats"][block] += nats * special
                sums["special_tokens"][block] += special
    if not seen.all():
        raise UsageError(
            f"--subset {subset}: {int((~seen).sum())} of {blocks} blocks were left out by fairseq; "
            "a perplexity over a part of a split is not its perplexity"
        )
    if not sums["tokens"].any():
        raise UsageError(f"--subset {subset}: no token of it is masked; raise --mask-prob")
    return BlockSums(**sums)


def _masked_tokens(
    model: nn.Module, sample: Mapping[str, Any], dictionary: Any
) -> Iterator[Tuple[int, float, bool]]:
    """Row, −ln p and whether it is `<s>` or `</s>`, of each masked token of a batch."""
    device = next(model.parameters()).device
    target: Tensor = sample["target"].to(device)  # [batch, T], padding where nothing is masked
    masked = target.ne(dictionary.pad())
    if not masked.any():
        return
    inputs = {name: value.to(device) for name, value in sample["net_input"].items()}
    logits = model(**inputs, masked_tokens=masked)[0].float()  # [masked tokens, types]
    nats = F.cross_entropy(logits, target[masked], reduction="none").double().tolist()
    special = (target[masked] == dictionary.bos()) | (target[masked] == dictionary.eos())
    rows = masked.nonzero()[:, 0].tolist()
    yield from zip(rows, nats, special.tolist())


def interval(
    nats: np.ndarray, tokens: np.ndarray, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> Tuple[float, float]:
    """The 95 % interval of a perplexity: percentiles of a bootstrap over blocks.

    Args:
        nats, tokens: `[blocks]`, −Σ ln p and the number of masked tokens.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    means = _resampled_means(nats, tokens, resamples, seed)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return math.exp(low), math.exp(high)


def _resampled_means(nats: np.ndarray, tokens: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Nats per masked token of each resample; the same blocks for the same seed and number."""
    generator = np.random.default_rng(seed)
    means: List[float] = []
    while len(means) < resamples:
        drawn = generator.integers(len(tokens), size=len(tokens))
        if tokens[drawn].any():
            means.append(nats[drawn].sum() / tokens[drawn].sum())
    return np.array(means)


def perplexity_report(sums: BlockSums, resamples: int = RESAMPLES) -> Dict[str, Any]:
    """Masked perplexity with its interval, and the same without `<s>` and `</s>`."""
    report: Dict[str, Any] = {}
    words = BlockSums(
        sums.nats - sums.special_nats,
        sums.tokens - sums.special_tokens,
        *(sums.special_nats, sums.special_tokens, sums.length),
    )
    for name, part in (("all", sums), ("without_special", words)):
        number = int(part.tokens.sum())
        if not number:
            continue
        mean = float(part.nats.sum()) / number
        low, high = interval(part.nats, part.tokens, resamples)
        report[name] = {
            "perplexity": math.exp(mean),
            "nats_per_token": mean,
            "bits_per_token": mean / math.log(2),
            "masked_tokens": number,
            "interval": {
                "low": low,
                "high": high,
                "level": LEVEL,
                "method": "bootstrap over blocks, percentiles",
                "resamples": resamples,
                "seed": BOOTSTRAP_SEED,
            },
        }
    report["blocks"] = len(sums.tokens)
    report["tokens"] = int(sums.length.sum())
    return report


def difference(sums: BlockSums, baseline: BlockSums, resamples: int = RESAMPLES) -> Dict[str, Any]:
    """How much less or more perplexed a model is than another, on the same masked tokens.

    Raises:
        UsageError: where the two did not see the same masked tokens.
    """
    for name in ("tokens", "special_tokens", "length"):
        if not np.array_equal(getattr(sums, name), getattr(baseline, name)):
            raise UsageError(
                "--baseline: its masked tokens are others; give a report on the same split with "
                "the same seed, probabilities and blocks"
            )
    ours, theirs = (
        _resampled_means(each.nats, each.tokens, resamples, BOOTSTRAP_SEED)
        for each in (sums, baseline)
    )
    low, high = np.quantile(ours - theirs, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    mean = float((sums.nats - baseline.nats).sum() / sums.tokens.sum())
    return {
        "nats_per_token": mean,
        "perplexity_ratio": math.exp(mean),
        "interval": {
            "low": math.exp(low),
            "high": math.exp(high),
            "level": LEVEL,
            "method": "paired bootstrap over blocks, percentiles",
            "resamples": resamples,
            "seed": BOOTSTRAP_SEED,
        },
    }


def provenance(path: Path, data: str, subset: str, task: Any, model: nn.Module) -> Dict[str, Any]:
    """What a perplexity is of, and how its masks came about."""
    return {
        "checkpoint": {"file": str(path), "sha256": sha256(path)},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": data,
        "subset": subset,
        "vocabulary": len(task.source_dictionary),
        "masks": {
            **{name: getattr(task.cfg, name) for name in Masking.__dataclass_fields__},
            "epoch": 1,
        },
        "text": {
            "sample_break_mode": str(
                getattr(task.cfg.sample_break_mode, "value", task.cfg.sample_break_mode)
            ),
            "tokens_per_sample": task.cfg.tokens_per_sample,
        },
        "versions": {
            "python": platform.python_version(),
            **installed_versions(
                ("moa-fairseq", "fairseq", "ve-fairseq", "fairseq-fixed", "torch", "numpy")
            ),
        },
    }


def report_text(report: Mapping[str, Any]) -> str:
    """The lines that a person reads."""
    masks, text = report["masks"], report["text"]
    lines: List[str] = []
    for name, label in (("all", ""), ("without_special", ", <s> and </s> left out")):
        part: Optional[Mapping[str, Any]] = report.get(name)
        if part is None:
            continue
        bounds = part["interval"]
        lines.append(
            f"masked perplexity{label} = {part['perplexity']:.3f} "
            f"({bounds['level']:.0%} interval {bounds['low']:.3f} to {bounds['high']:.3f}), "
            f"{part['masked_tokens']:,} masked tokens, {part['bits_per_token']:.4f} bits each"
        )
    lines += [
        "exp of the mean of -ln p over masked tokens, full softmax over "
        f"{report['vocabulary']:,} types; comparable only with the same subwords and masks",
        f"split {report['subset']} of {report['data']}: {report['blocks']:,} blocks, "
        f"{report['tokens']:,} tokens (--sample-break-mode {text['sample_break_mode']}, "
        f"--tokens-per-sample {text['tokens_per_sample']})",
        f"masks: seed {masks['seed']}, --mask-prob {masks['mask_prob']}, of these "
        f"{masks['leave_unmasked_prob']:.0%} unchanged and {masks['random_token_prob']:.0%} random",
        "interval: bootstrap over blocks, "
        f"{report['all']['interval']['resamples']} resamples, "
        f"seed {report['all']['interval']['seed']}",
        f"checkpoint {report['checkpoint']['file']}, {report['parameters']:,} parameters",
    ]
    if "difference" in report:
        paired = report["difference"]
        bounds = paired["interval"]
        lines.append(
            f"against {paired['baseline']}: perplexity times {paired['perplexity_ratio']:.4f} "
            f"({bounds['level']:.0%} interval {bounds['low']:.4f} to {bounds['high']:.4f}, "
            "the same masked tokens)"
        )
    return "\n".join(lines) + "\n"
