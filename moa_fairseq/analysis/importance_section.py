"""The importance of experts as a section of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from .importance import ExpertImportance, Importance, ImportanceOptions, measure_importance
from .importance_figures import bleu_figure, change_figure, load_figure
from .report_sections import ReportFigure, ReportSection, ReportTable
from .resampling import bleu_signature, spearman
from .text_codec import TextCodec


def importance_section(
    model: Any,
    task: Any,
    checkpoint: Path,
    options: ImportanceOptions,
    codec: TextCodec,
    name: str = "importance",
) -> ReportSection:
    """Measure every expert of a model, one at a time, and tell what came out.

    Args:
        model, task, checkpoint, options, codec: see
            :func:`~moa_fairseq.analysis.importance.measure_importance`.
        name: of the section; its files' names begin with it.

    Raises:
        UsageError: as there.
    """
    return section_of(measure_importance(model, task, checkpoint, options, codec), options, name)


def section_of(measured: Importance, options: ImportanceOptions, name: str) -> ReportSection:
    """The section of what was measured with `options`."""
    results, sentences, tokens = measured.results, measured.sentences, measured.tokens
    single = [result for result in results if result.expert is not None]
    single.sort(key=lambda result: -result.loss.value)
    whole = [result for result in results if result.expert is None]
    correlations = load_correlations(results)
    marked = sum(result.loss.excludes_zero for result in single)
    top = single[0]
    paragraphs = [
        "Each expert in turn is masked out: its gate is zero wherever the router selects it, the "
        "other experts and their gates stay as they are and are not normalised again (as heads "
        "are masked by Michel et al., 2019). The change of loss, in nats per scored token, is the "
        "loss without the expert less the loss of the whole model: positive where the expert "
        "helps. The model was not trained to do without it, and changes of several experts do not "
        "add up: all experts of a module masked together stand beside them for scale.",
        f"Measured on {sentences} sentences with {tokens} scored tokens of {options.subset} "
        f"(seed {options.seed}), on which the whole model's loss is "
        f"{measured.loss:.4f} nats per token. "
        "Every change is paired, on the same sentences; intervals hold 95 % of "
        f"{options.resamples} bootstrap resamples of the sentences.",
        f"For {marked} of {len(single)} experts the interval does not hold 0; of experts without "
        f"any effect about {round(0.05 * len(single))} of {len(single)} would show as much by "
        f"chance. The greatest change is that of {top.label}, expert {top.expert}: "
        f"{top.loss.value:+.4f} ({top.loss.low:+.4f} to {top.loss.high:+.4f}).",
        _on_load(correlations),
    ]
    figures = [
        ReportFigure(
            f"{name}-loss",
            "Change of loss when one expert is masked out. Orange: the loss rises, the expert "
            "helps; violet: it falls; a dot where the 95 % interval does not hold 0. The scale is "
            "that of square roots. Right: all experts of the module masked together, with 95 % "
            "intervals.",
            f"Heat map of {len(whole)} modules by experts; the greatest change is "
            f"{top.loss.value:.3g} nats per token, of {top.label}, expert {top.expert}.",
            change_figure(results),
        ),
        ReportFigure(
            f"{name}-load",
            "Does an expert matter more that gets more of the gates? One point for each expert.",
            "Scatter plots of change of loss over share of the gates, by kind of module.",
            load_figure(results),
        ),
    ]
    tables = [
        ReportTable(
            f"{name}-experts",
            "Change of loss when one expert is masked out, greatest first.",
            (
                *("module", "expert", "change of loss (nats per token)", "95 % from", "to"),
                *("share of tokens that select it", "share of gates"),
            ),
            [(r.label, r.expert, *r.loss, r.selection_share, r.gate_share) for r in single],
        ),
        ReportTable(
            f"{name}-modules",
            "Change of loss when all experts of a module are masked out together.",
            ("module", "change of loss (nats per token)", "95 % from", "to"),
            [(r.label, *r.loss) for r in whole],
            shown=len(whole),
        ),
        ReportTable(
            f"{name}-load",
            "Spearman's rank correlation, over the experts of a module, of change of loss and "
            "load; empty where all loads are equal.",
            ("module", "experts", "with share of tokens", "with share of gates"),
            correlations,
            shown=len(correlations),
        ),
    ]
    if measured.bleu is not None:
        changes = [(r, r.bleu) for r in results if r.bleu is not None]
        paragraphs.append(
            f"BLEU on the first {measured.translated} of these sentences "
            f"(beam {options.beam}, detokenised, against the detokenised targets of the data; "
            f"{bleu_signature()}): {measured.bleu:.2f} for the whole model."
        )
        tables.append(
            ReportTable(
                f"{name}-bleu",
                "Change of BLEU when an expert, or a whole module, is masked out.",
                ("module", "expert", "change of BLEU", "95 % from", "to"),
                [
                    (result.label, "all" if result.expert is None else result.expert, *bleu)
                    for result, bleu in sorted(changes, key=lambda change: change[1].value)
                ],
            )
        )
        figures.append(
            ReportFigure(
                f"{name}-bleu",
                f"Change of BLEU when one of the {options.bleu_experts} experts with the greatest "
                "change of loss is masked out. Coloured where the 95 % interval does not hold 0.",
                "Changes of BLEU with their intervals, one row for each expert.",
                bleu_figure(results),
            )
        )
    numbers = {
        "sentences": sentences,
        "tokens": tokens,
        "loss": measured.loss,
        "bleu": measured.bleu,
        "subset": options.subset,
        "seed": options.seed,
        "resamples": options.resamples,
        "results": [_as_numbers(result) for result in results],
        "load_correlations": [
            dict(zip(("module", "experts", "selections", "gates"), row)) for row in correlations
        ],
    }
    return ReportSection(
        name,
        "Importance: what is lost without an expert",
        tuple(paragraphs),
        tuple(figures),
        tuple(tables),
        numbers,
    )


def load_correlations(results: Sequence[ExpertImportance]) -> List[Tuple[Any, ...]]:
    """For each module: its label, number of experts, Spearman's ρ with selections and gates."""
    rows: List[Tuple[Any, ...]] = []
    for label in dict.fromkeys(result.label for result in results):
        own = [result for result in results if result.label == label and result.expert is not None]
        changes = [result.loss.value for result in own]
        rows.append(
            (
                label,
                len(own),
                spearman(changes, [result.selection_share or 0.0 for result in own]),
                spearman(changes, [result.gate_share or 0.0 for result in own]),
            )
        )
    return rows


def _on_load(correlations: Sequence[Tuple[Any, ...]]) -> str:
    """One paragraph: does load predict importance?"""
    sentences = []
    for column, what in ((2, "share of tokens that select it"), (3, "share of the gates")):
        values = [row[column] for row in correlations if row[column] is not None]
        if values:
            positive = sum(value > 0 for value in values)
            sentences.append(
                f"with its {what}: median {np.median(values):+.2f} over {len(values)} modules, "
                f"positive in {positive}"
            )
    if not sentences:
        return "All experts have the same load, which says nothing about their importance."
    return (
        "Does load predict importance? Spearman's rank correlation, within a module, of an "
        f"expert's change of loss {'; '.join(sentences)}."
    )


def _as_numbers(result: ExpertImportance) -> Dict[str, Any]:
    numbers = result._asdict()
    for key in ("loss", "bleu"):
        numbers[key] = None if numbers[key] is None else numbers[key]._asdict()
    return numbers
