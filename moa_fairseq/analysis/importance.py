"""How much each expert matters: the change of loss and BLEU when it alone is masked out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np
from fairseq.models import FairseqEncoderDecoderModel
from tqdm import tqdm

from ..errors import UsageError
from ..modules.recording import ROUTED_KINDS, routed_modules
from ..text.files import sha256
from .importance_journal import Journal
from .importance_measuring import Load, Subject, Translator, sample_indices
from .resampling import (
    ENDS,
    Estimate,
    bleu_statistics,
    corpus_bleu,
    ratio_of_sums,
    resampled_bleu,
    resampled_counts,
)
from .text_codec import TextCodec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportanceOptions:
    """What to measure.

    Attributes:
        subset: of the data.
        sentences: of the sample whose loss is measured.
        seed: of the sample and of the resampling.
        max_tokens: in a batch, padding included.
        resamples: of the bootstrap.
        bleu_experts: for how many experts, those with the greatest change of loss, BLEU is
            measured too; 0 for none.
        bleu_sentences: of the sample, its first ones, are translated for that.
        beam, lenpen: of the search.
        journal: file of results, which a later run with the same sample goes on with; None for
            none.
    """

    subset: str = "test"
    sentences: int = 200
    seed: int = 1
    max_tokens: int = 2048
    resamples: int = 1000
    bleu_experts: int = 0
    bleu_sentences: int = 200
    beam: int = 5
    lenpen: float = 1.0
    journal: Optional[Path] = None

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--importance", self.sentences, 2),
            ("--importance-bleu-experts", self.bleu_experts, 0),
            ("--importance-bleu-sentences", self.bleu_sentences, 2),
            ("--importance-resamples", self.resamples, 100),
            ("--beam", self.beam, 1),
            ("--max-tokens", self.max_tokens, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} {value}: it must be at least {least}")


class ExpertImportance(NamedTuple):
    """What masking an expert does, beside what the router gives it.

    Attributes:
        module: name in the model; `kind` and `position` as in a `RecordedRouting`.
        expert: its number; None for all experts of the module together.
        loss: change in nats per scored token; positive where the expert helps.
        selection_share: share of the tokens that select it (None for a whole module).
        gate_share: its share of the module's gates (None for a whole module).
        bleu: change of BLEU, where it was measured.
    """

    module: str
    kind: str
    position: int
    expert: Optional[int]
    loss: Estimate
    selection_share: Optional[float]
    gate_share: Optional[float]
    bleu: Optional[Estimate] = None

    @property
    def label(self) -> str:
        return f"{self.kind} {self.position}"


@dataclass(frozen=True)
class Importance:
    """What was measured.

    Attributes:
        results: for each module that of all its experts together, then those of its experts.
        sentences: with scored tokens, in the sample.
        tokens: that were scored.
        loss: of the whole model, nats per scored token.
        bleu: of the whole model; None where it was not measured.
        translated: sentences that BLEU is of.
    """

    results: Tuple[ExpertImportance, ...]
    sentences: int
    tokens: int
    loss: float
    bleu: Optional[float] = None
    translated: int = 0


def measure_importance(
    model: Any,
    task: Any,
    checkpoint: Path,
    options: ImportanceOptions,
    codec: TextCodec,
) -> Importance:
    """Measure every expert of a model, one at a time, on a sample of a split.

    Args:
        model: of fairseq, with routed modules, loaded from `checkpoint`.
        task: of fairseq, with `options.subset` loaded.
        checkpoint: its digest tells the journal's results from those of another model.
        options: see there.
        codec: detokenises translations.

    Raises:
        UsageError: for options that do not go with the model or the data, and for a journal of
            another measurement.
    """
    if not list(routed_modules(model)):
        raise UsageError(f"{checkpoint} has no routed module, so no expert that could be masked")
    if options.bleu_experts and not isinstance(model, FairseqEncoderDecoderModel):
        raise UsageError(
            f"--importance-bleu-experts {options.bleu_experts}: this model does not translate; "
            "leave the option out"
        )
    indices = sample_indices(task, model, options.subset, options.sentences, options.seed)
    if len(indices) < 2:
        raise UsageError(
            f"--subset {options.subset} has {len(indices)} sentences that the model has positions "
            "for; give one with at least 2"
        )
    subject = Subject(model, task, options.subset, indices, options.max_tokens)
    parameter = next(model.parameters())
    journal = Journal(
        options.journal,
        {
            "checkpoint": sha256(checkpoint),
            "data": subject.digest,
            "subset": options.subset,
            "sentences": options.sentences,
            "seed": options.seed,
            "max_tokens": options.max_tokens,
            "translation": [options.bleu_sentences, options.beam, options.lenpen],
            "computed": [str(parameter.dtype), parameter.device.type],
        },
    )
    results = _measure_losses(model, subject, journal, options)
    tokens = int(subject.tokens.sum())
    measured = Importance(
        tuple(results),
        int((subject.tokens > 0).sum()),
        tokens,
        float(subject.losses.sum() / tokens),
    )
    if not options.bleu_experts:
        return measured
    translator = Translator(
        model,
        task,
        options.subset,
        indices[: options.bleu_sentences],
        options.max_tokens,
        codec,
        options.beam,
        options.lenpen,
    )
    results, bleu = _measure_bleu(subject, translator, journal, results, options)
    return replace(
        measured, results=tuple(results), bleu=bleu, translated=len(translator.references)
    )


def _measure_losses(
    model: Any, subject: Subject, journal: Journal, options: ImportanceOptions
) -> List[ExpertImportance]:
    """Every module as a whole, then its experts; by kind of module and layer."""
    done = {
        (record["module"], record["expert"]): record["loss_changes"]
        for record in journal.records
        if "loss_changes" in record
    }
    modules = sorted(
        routed_modules(model), key=lambda entry: (ROUTED_KINDS.index(entry[2].kind), entry[1])
    )
    jobs: List[Tuple[str, Optional[int]]] = []
    for name, _, module in modules:
        jobs += [(name, None), *((name, expert) for expert in range(module.num_experts))]
    missing = [job for job in jobs if job not in done]
    if len(missing) < len(jobs):
        logger.info("%d of %d results are in the journal", len(jobs) - len(missing), len(jobs))
    for job in tqdm(missing, unit="expert", desc="loss without one expert", mininterval=1):
        name, expert = job
        all_experts = range(subject.modules[name].num_experts)
        changes = subject.loss_changes(name, all_experts if expert is None else [expert])
        journal.add({"module": name, "expert": expert, "loss_changes": changes})
        done[job] = changes
    scored = subject.tokens > 0
    tokens = subject.tokens[scored]
    counts = resampled_counts(len(tokens), options.resamples, options.seed)
    results = []
    for name, position, module in modules:
        load = subject.loads[name]
        for expert in (None, *range(module.num_experts)):
            loss = ratio_of_sums(np.asarray(done[name, expert])[scored], tokens, counts)
            shares = (None, None) if expert is None else _shares(load, expert)
            results.append(ExpertImportance(name, module.kind, position, expert, loss, *shares))
    return results


def _shares(load: Load, expert: int) -> Tuple[float, float]:
    selections = float(load.selections[expert] / load.tokens)
    return selections, float(load.gates[expert] / load.gates.sum())


def _measure_bleu(
    subject: Subject,
    translator: Translator,
    journal: Journal,
    results: List[ExpertImportance],
    options: ImportanceOptions,
) -> Tuple[List[ExpertImportance], float]:
    """BLEU of the most important experts and of the modules; and that of the whole model."""
    done = {
        (record["module"], record["expert"]): record["hypotheses"]
        for record in journal.records
        if "hypotheses" in record
    }
    experts = sorted(
        (place for place, result in enumerate(results) if result.expert is not None),
        key=lambda place: -abs(results[place].loss.value),
    )
    chosen = experts[: options.bleu_experts]
    chosen += [place for place, result in enumerate(results) if result.expert is None]
    jobs: List[Tuple[Optional[str], Optional[int]]] = [(None, None)]
    jobs += [(results[place].module, results[place].expert) for place in chosen]
    missing = [job for job in jobs if job not in done]
    for name, expert in tqdm(missing, unit="expert", desc="BLEU without one expert"):
        if name is None:
            hypotheses = translator.translate()
        else:
            module = subject.modules[name]
            masked = range(module.num_experts) if expert is None else [expert]
            hypotheses = translator.translate(module, masked)
        journal.add({"module": name, "expert": expert, "hypotheses": hypotheses})
        done[name, expert] = hypotheses
    references = translator.references
    counts = resampled_counts(len(references), options.resamples, options.seed)
    baseline = bleu_statistics(done[None, None], references)
    baseline_bleu, resampled = corpus_bleu(baseline.sum(axis=0)), resampled_bleu(baseline, counts)
    measured = list(results)
    for place in chosen:
        statistics = bleu_statistics(done[results[place].module, results[place].expert], references)
        differences = resampled_bleu(statistics, counts) - resampled
        low, high = np.percentile(differences, ENDS)
        value = corpus_bleu(statistics.sum(axis=0)) - baseline_bleu
        measured[place] = results[place]._replace(bleu=Estimate(value, float(low), float(high)))
    return measured, baseline_bleu
