"""One sentence as a section of a report."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Tuple

from .report_sections import ReportFigure, ReportSection, ReportTable
from .sentence import (
    ModuleView,
    SentenceOptions,
    SentenceView,
    chosen_for_maps,
    view_sentence,
)
from .sentence_figures import Fonts, attention_figure, fonts_for, routing_figure
from .text_codec import TextCodec

logger = logging.getLogger(__name__)

# Digits of gates and weights in files.
_DIGITS = 6


def sentence_section(
    model: Any,
    task: Any,
    options: SentenceOptions,
    codec: TextCodec,
    name: str = "sentence",
) -> ReportSection:
    """Show who routes where, token by token, and what each selected head attends to.

    Args:
        model, task, options, codec: see :func:`~moa_fairseq.analysis.sentence.view_sentence`.
        name: of the section; its files' names begin with it.

    Raises:
        UsageError: as there, and for modules in `options.maps` that the model does not have.
    """
    view = view_sentence(model, task, options, codec)
    drawn = chosen_for_maps(view, options.maps)
    fonts = fonts_for("".join((*view.source_tokens, *view.target_tokens)))
    if fonts.missing:
        logger.warning(
            "no installed font has %s; pictures show the place of such tokens only",
            " ".join(sorted(fonts.missing)),
        )
    figures = [_routing(name, module, fonts) for module in view.modules]
    figures += [_attention(name, module, fonts) for module in drawn]
    return ReportSection(
        name,
        "One sentence: who routes where",
        _paragraphs(view, drawn, fonts),
        tuple(figures),
        (_tokens_table(name, view), _routing_table(name, view), _attention_table(name, view)),
        _numbers(view),
    )


def _routing(name: str, module: ModuleView, fonts: Fonts) -> ReportFigure:
    return ReportFigure(
        f"{name}-routing-{_stem(module)}",
        f"{module.label} ({module.name}): the experts that each token selects, coloured by gate; "
        "grey: not selected.",
        f"Grid of {len(module.queries)} tokens by {module.experts} experts of {module.name}.",
        routing_figure(module, fonts),
    )


def _attention(name: str, module: ModuleView, fonts: Fonts) -> ReportFigure:
    return ReportFigure(
        f"{name}-attention-{_stem(module)}",
        f"{module.label} ({module.name}): one map for each head that the sentence uses. Rows: the "
        "tokens that selected it; columns: the keys, whose "
        "weights sum to 1 in each row; the scale is that of square roots.",
        f"Attention maps of the experts of {module.name} that this sentence uses.",
        attention_figure(module, fonts),
    )


def _stem(module: ModuleView) -> str:
    return f"{module.kind}-{module.position}"


def _paragraphs(view: SentenceView, drawn: List[ModuleView], fonts: Fonts) -> Tuple[str, ...]:
    paragraphs = [f"Source: {view.source}"]
    if view.target is not None:
        whose = " (the model's own translation)" if view.own_translation else ""
        paragraphs.append(f"Target{whose}: {view.target}")
        paragraphs.append(
            "Numbers before tokens are places in the sentence. A decoder's row is named after the "
            "token that goes in and, after the arrow, the one that is to come out; the target goes "
            "in as it is, whatever the model would have said."
        )
    else:
        paragraphs.append("Numbers before tokens are places in the sentence.")
    names = ", ".join(module.label for module in drawn)
    paragraphs.append(
        "A gate is the weight of an expert's output. Routing is shown of every module, attention "
        f"of {names or 'none'}; the tables and numbers have all of both."
    )
    if fonts.missing:
        paragraphs.append(
            "No font on the machine that drew this has the characters "
            f"{' '.join(sorted(fonts.missing))}: tokens with them are shown by their place alone."
        )
    return tuple(paragraphs)


def _tokens_table(name: str, view: SentenceView) -> ReportTable:
    rows = [
        (side, place, token)
        for side, tokens in (("source", view.source_tokens), ("target", view.target_tokens))
        for place, token in enumerate(tokens)
    ]
    return ReportTable(
        f"{name}-tokens",
        "The sentence as the model sees it.",
        ("side", "place", "token"),
        rows,
        shown=len(rows),
    )


def _routing_table(name: str, view: SentenceView) -> ReportTable:
    rows = [
        (module.name, place, token, expert, gate)
        for module in view.modules
        for place, token in enumerate(module.queries)
        for expert, gate in zip(module.indices[place].tolist(), _rounded(module.gates[place]))
    ]
    return ReportTable(
        f"{name}-routing",
        "The experts that each token selects, and their gates.",
        ("module", "place", "token", "expert", "gate"),
        rows,
        shown=0,
    )


def _attention_table(name: str, view: SentenceView) -> ReportTable:
    rows = [
        (module.name, place, expert, head, key, weight)
        for module in view.modules
        if module.weights is not None
        for place, experts in enumerate(module.indices.tolist())
        for rank, expert in enumerate(experts)
        for head in range(module.heads)
        for key, weight in enumerate(_rounded(module.weights[place, rank, head]))
    ]
    return ReportTable(
        f"{name}-attention",
        "What the heads of these experts attend to; the weights of a head sum to 1.",
        ("module", "place", "expert", "head", "place of the key", "weight"),
        rows,
        shown=0,
    )


def _numbers(view: SentenceView) -> Dict[str, Any]:
    return {
        "source": view.source,
        "target": view.target,
        "own_translation": view.own_translation,
        "source_tokens": list(view.source_tokens),
        "target_tokens": list(view.target_tokens),
        "modules": [
            {
                "name": module.name,
                "kind": module.kind,
                "position": module.position,
                "experts": module.experts,
                "heads_per_expert": module.heads,
                "tokens": list(module.queries),
                "keys": list(module.keys),
                "selected": module.indices.tolist(),
                "gates": _rounded(module.gates),
                "attention": None if module.weights is None else _rounded(module.weights),
            }
            for module in view.modules
        ],
    }


def _rounded(tensor: Any) -> Any:
    return tensor.double().round(decimals=_DIGITS).tolist()
