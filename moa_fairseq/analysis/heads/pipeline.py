"""From checkpoints to a folder with a page: which sections a report has, and in which order."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ...text.files import atomic_writer, sha256
from ...versions import installed_versions
from ..report_sections import ReportSection
from .cards import card_section, overview_section
from .context import ModelContext, ReportOptions, load_contexts
from .load_section import load_section
from .page import merged_numbers, page
from .place_section import place_section_of_frequency, place_section_of_position
from .single_model import importance_of, sentence_of
from .streams import TARGET
from .structure_section import agreement_section, together_section
from .survey import survey
from .surveyed import Surveyed, of_model
from .token_section import decision_section, word_section
from .writing import PAGE, whole_folder, write_figures, write_report, write_table

logger = logging.getLogger(__name__)

#: Sections that set models side by side, in their order on the page.
COMPARING_SECTIONS: Tuple[Callable[[Sequence[Surveyed]], ReportSection], ...] = (
    overview_section,
    card_section,
    load_section,
    decision_section,
    word_section,
    place_section_of_position,
    place_section_of_frequency,
    together_section,
    agreement_section,
)
#: Sections of one model each, which come after those, where the options ask for them.
MODEL_SECTIONS: Tuple[Callable[[ModelContext], Optional[ReportSection]], ...] = (
    importance_of,
    sentence_of,
)

PACKAGES = ("moa-fairseq", "ve-fairseq", "fairseq", "torch", "numpy", "matplotlib")


def make_sections(models: Sequence[Surveyed]) -> List[ReportSection]:
    """Every section of a report on these models."""
    sections = [make(models) for make in COMPARING_SECTIONS]
    for model in models:
        for make_one in MODEL_SECTIONS:
            section = make_one(model.context)
            if section is None:
                continue
            sections.append(section if len(models) == 1 else of_model(section, model.name))
    return sections


def head_report(
    paths: Sequence[Path], data: str, out: Path, options: ReportOptions, command: Sequence[str]
) -> Path:
    """Run each checkpoint over a split of the data and write a report to the folder `out`.

    Args:
        paths: checkpoints of MoA models.
        data: folder of binarised data, as fairseq's commands take it.
        out: has to be new, empty or an earlier report, which is replaced once the new one is whole.
        options: what is asked for.
        command: how it was called, for the record.

    Returns:
        the page's path.

    Raises:
        UsageError: for what the user can mend.
    """
    models = []
    for context in load_contexts(paths, data, options):
        logger.info("running %s over %s", context.name, options.subset)
        models.append(Surveyed(context, survey(context)))
    with whole_folder(out) as folder:
        logger.info("drawing")
        sections = make_sections(models)
        numbers = merged_numbers(sections)
        pictures = write_figures(folder, sections)
        for table in (table for section in sections for table in section.tables):
            write_table(folder, table)
        about = _about(models, data, options, command)
        with atomic_writer(folder / PAGE) as stream:
            stream.write(
                page(_title(models), _introduction(models), _facts(about), sections, pictures)
            )
        write_report(folder, {**about, "sections": numbers})
    return out / PAGE


def _title(models: Sequence[Surveyed]) -> str:
    return "Head report: " + ", ".join(model.name for model in models)


def _introduction(models: Sequence[Surveyed]) -> List[str]:
    sizes = [
        f"{model.name} read "
        + " and ".join(
            f"{stream.tokens:,} {name} tokens" for name, stream in model.survey.streams.items()
        )
        + f" of {max(each.sentences for each in model.survey.streams.values()):,} sentences"
        for model in models
    ]
    return [
        f"What the routers of these models do on the split {models[0].context.options.subset}: "
        f"{'; '.join(sizes)}.",
        "How to read this: begin with “What stands out”, then open a module under “Experts one by "
        "one”; its rows say what each head is used for. The sections after it show the same by "
        "theme, with all numbers in the linked files. A head is an expert: a router picks K of E "
        f"of them for every token. {_whose_tokens(models)} Modules are named by kind and layer, "
        "and experts and layers are counted from 0, as in the model's own names.",
        "Every figure stands beside what uniform routing gives and what a random router gives: "
        "one with untrained weights as large as the trained ones, that sees the same tokens in the "
        "same place of the trained model. A pattern that the random router shows as well says "
        "nothing of what was learned.",
    ]


def _whose_tokens(models: Sequence[Surveyed]) -> str:
    text = "Encoder modules route source tokens"
    if any(TARGET in model.survey.streams for model in models):
        text += (
            "; decoder modules, cross attention included, route the target's input tokens, which "
            "are those before the word that is predicted"
        )
    if any(hasattr(model.context.task, "mask_idx") for model in models):
        text += "; what a masked language model has to guess is routed as it sees it, as <mask>"
    return text + "."


def _about(
    models: Sequence[Surveyed], data: str, options: ReportOptions, command: Sequence[str]
) -> Dict[str, Any]:
    return {
        "command": shlex.join(command),
        "data": data,
        "subset": options.subset,
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "versions": installed_versions(PACKAGES),
        "device": str(models[0].context.device)
        + (f" ({torch.cuda.get_device_name()})" if models[0].context.device.type == "cuda" else ""),
        "models": [
            {
                "name": model.name,
                "path": str(model.context.path),
                "sha256": sha256(model.context.path),
                "streams": {
                    name: {"tokens": stream.tokens, "sentences": stream.sentences}
                    for name, stream in model.survey.streams.items()
                },
            }
            for model in models
        ],
    }


def _facts(about: Dict[str, Any]) -> Dict[str, str]:
    facts = {"command": about["command"], "data": f"{about['data']}, split {about['subset']}"}
    for model in about["models"]:
        facts[f"checkpoint {model['name']}"] = f"{model['path']}, SHA-256 {model['sha256']}"
    facts["options"] = ", ".join(f"{name} {value}" for name, value in about["options"].items())
    facts["versions"] = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    facts["device"] = about["device"]
    facts["numbers"] = "report.json holds those of every section; tables are CSV files"
    return facts
