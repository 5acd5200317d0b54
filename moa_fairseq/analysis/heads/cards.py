"""Experts one by one, and what stands out: where a reader begins."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

from ..report_sections import ReportSection, ReportTable
from .place_section import preferred, strongest
from .structure_section import agreements, strongest_pair, together
from .surveyed import FREQUENCY, PIECE, POSITION, WORD, Surveyed, finite, relative_load, slug
from .token_section import decided, differences, favourites, largest_random

#: Words that a card names.
WORDS_OF_CARD = 6


def card_section(models: Sequence[Surveyed]) -> ReportSection:
    """A table for each module with a row for each expert: everything on it in one place."""
    tables = []
    numbers: Dict[str, Any] = {}
    for model in models:
        for name in model.modules():
            tables.append(_card_table(models, model, name))
    for table in tables:
        numbers[table.name] = [dict(zip(table.header, row)) for row in table.rows]
    return ReportSection(
        "experts",
        "Experts one by one",
        (
            "Open a module and read a row to learn one head's role: how much it is used, for which "
            "words, where in the sentence and with whom. Words are those with the highest PMI "
            "(bits after each; the number of tokens in brackets). “Differs by” is how much the "
            "words of the expert differ from all words, in bits; beside the module's name stands "
            "how much those of a random router do. Its rarely used experts differ most, as rare "
            "experts always do; the mean is weighted by load.",
        ),
        (),
        tuple(tables),
        numbers,
    )


def _card_table(models: Sequence[Surveyed], model: Surveyed, name: str) -> ReportTable:
    totals = model.survey.trained[name]
    load = relative_load(totals)
    words = favourites(model, name, WORD, WORDS_OF_CARD)
    differs = differences(model, name, WORD)
    places, counts = preferred(POSITION, model, name), preferred(FREQUENCY, model, name)
    partners = together(totals).nan_to_num(nan=-math.inf)
    rows = []
    for expert in range(totals.num_experts):
        partner = int(partners[expert].argmax())
        value = finite(partners[expert, partner], 2)
        interval = finite(load.half_width[expert])
        rows.append(
            (
                expert,
                f"{float(load.value[expert]):.2f}"
                + ("" if interval is None else f" ± {interval:.3f}"),
                finite(differs.experts[expert], 2),
                ", ".join(
                    f"{text} {bits:.1f} ({count:,})" for text, bits, count, _ in words[expert]
                ),
                _placed(places[expert]),
                _placed(counts[expert]),
                None if value is None else f"expert {partner} ({value:+.2f})",
            )
        )
    header = (
        *("expert", "load (1: uniform)", "differs by, bits"),
        *("words, PMI (tokens)", "position, PMI", "training count, PMI", "most often with"),
    )
    mark = "" if len(models) == 1 else f"{slug(model.name)}_"
    of = "" if len(models) == 1 else f"{model.name}: "
    title = f"{of}{model.label(name)} ({name}), K = {totals.num_selected} of E = "
    return ReportTable(
        f"experts_{mark}{slug(model.label(name))}",
        f"{title}{totals.num_experts}; experts of the random router differ by "
        f"{differs.random_mean:.2f} bits on average, {differs.random_largest:.2f} at most.",
        header,
        rows,
        shown=len(rows),
    )


def _placed(found: Any) -> Any:
    return None if found is None else f"{found[0]} ({found[1]:+.1f})"


def overview_section(models: Sequence[Surveyed]) -> ReportSection:
    """What stands out, computed from the numbers of the other sections."""
    paragraphs: List[str] = []
    numbers: Dict[str, Any] = {}
    for model in models:
        texts, found = _findings(model)
        lead = "" if len(models) == 1 else f"{model.name}: "
        paragraphs += [lead + text for text in texts]
        numbers[model.name] = found
    return ReportSection("overview", "What stands out", tuple(paragraphs), numbers=numbers)


def _findings(model: Surveyed) -> Tuple[List[str], Dict[str, Any]]:
    parts = [_on_load, _on_decisions, _on_words, _on_position, _on_pairs, _on_layers]
    texts, numbers = [], {}
    for part in parts:
        text, found = part(model)
        texts.append(text)
        numbers[part.__name__[4:]] = found
    return texts, numbers


def _on_load(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    found = []
    unused = 0
    experts = 0
    uneven = 0
    for name in model.modules():
        totals = model.survey.trained[name]
        load = relative_load(totals)
        unused += int((totals.selected.y == 0).sum())
        experts += totals.num_experts
        uneven += int(((load.value - 1).abs() > load.half_width).sum())
        found += [
            (float(value), float(width), name, expert)
            for expert, (value, width) in enumerate(zip(*load))
        ]
    ends = {}
    texts = []
    for key, (value, width, name, expert) in (("most", max(found)), ("least", min(found))):
        ends[key] = {
            **{"module": name, "expert": expert, "load": finite(value)},
            "half_width": finite(width),
        }
        margin = "" if math.isnan(width) else f" ± {width:.3f}"
        texts.append(
            f"{key} used is expert {expert} of {model.label(name)} ({value:.2f}{margin} times its "
            "uniform load)"
        )
    kind = "selection" if all(t.selects for t in model.survey.trained.values()) else "gates"
    text = (
        f"Load, by {kind}: {'; '.join(texts)}. Of {experts} experts in {len(model.modules())} "
        f"modules {unused} are never used; the load of {uneven} differs from uniform beyond its "
        "95 % interval."
    )
    return text, {**ends, "unused": unused, "experts": experts, "differ_from_uniform": uneven}


def _on_decisions(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    shares = []
    for name in model.modules():
        trained = decided(model, name, PIECE, model.survey.trained[name]).share
        other = decided(model, name, PIECE, model.survey.random[name]).share
        if math.isfinite(trained) and math.isfinite(other):
            shares.append((trained, other, name))
    if not shares:
        return "No module treats tokens differently.", {}
    (most, most_random, high), (least, least_random, low) = max(shares), min(shares)
    text = (
        f"The piece alone decides {100 * most:.0f} % of the routing in {model.label(high)} (random "
        f"router: {100 * most_random:.0f} %) and {100 * least:.0f} % in {model.label(low)} (random "
        f"router: {100 * least_random:.0f} %); the rest comes from the context."
    )
    return text, {
        "most": {"module": high, "share": finite(most), "random": finite(most_random)},
        "least": {"module": low, "share": finite(least), "random": finite(least_random)},
    }


def _on_words(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    found = []
    above = compared = 0
    for name in model.modules():
        differs = differences(model, name, WORD)
        for expert, value in enumerate(differs.experts.tolist()):
            if math.isfinite(value):
                compared += 1
                above += value > differs.random_largest
                found.append((value, name, expert, differs))
    if not found:
        return "No word has tokens enough to say what experts prefer.", {}
    value, name, expert, differs = max(found, key=lambda each: each[0])
    words = favourites(model, name, WORD, WORDS_OF_CARD)[expert]
    listed = ", ".join(
        f"“{word.text}” ({word.bits:.1f} bits, {word.tokens:,} tokens)" for word in words
    )
    claim = (
        f"{above} of {compared} experts differ more than every expert of the random router in "
        "the same module"
    )
    reached = largest_random(model, name, WORD)
    text = (
        f"Most specialised in words is expert {expert} of {model.label(name)}: its words differ "
        f"from all words by {value:.2f} bits (experts of the random router there: "
        f"{differs.random_mean:.2f} on average, {differs.random_largest:.2f} at most). Its "
        f"top words: {listed or 'none with tokens enough'}; the largest PMI that the random "
        f"router reaches there is {reached:.1f} bits. {claim}."
    )
    return text, {
        **{"module": name, "expert": expert, "bits": finite(value)},
        "random_mean": finite(differs.random_mean),
        "random_largest": finite(differs.random_largest),
        "words": [word._asdict() for word in words],
        **{"above_random": above, "compared": compared},
    }


def _on_position(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    value, name, expert = strongest(POSITION, model)
    if math.isnan(value):
        return "No position has tokens enough.", {}
    differs = differences(model, name, POSITION)
    place = preferred(POSITION, model, name)[expert]
    where = "" if place is None else f", which prefers position {place[0]} ({place[1]:+.1f} bits)"
    text = (
        f"Position matters most to expert {expert} of {model.label(name)}{where}: its positions "
        f"differ from all by {value:.2f} bits (experts of the random router there: "
        f"{differs.random_mean:.2f} on average, {differs.random_largest:.2f} at most)."
    )
    return text, {
        **{"module": name, "expert": expert, "bits": finite(value)},
        "random_mean": finite(differs.random_mean),
        "random_largest": finite(differs.random_largest),
        "prefers": None if place is None else place[0],
    }


def _on_pairs(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    value, name, first, second = strongest_pair(model)
    if math.isnan(value):
        return "With K = 1 no two experts are used for the same token.", {}
    selects = model.survey.trained[name].selects
    how = (
        f", {2**value:.1f} times as often as their loads alone explain"
        if selects
        else f" (correlation of their gates {value:+.2f})"
    )
    text = f"Most often together are experts {first} and {second} of {model.label(name)}{how}."
    return text, {"module": name, "experts": [first, second], "value": finite(value)}


def _on_layers(model: Surveyed) -> Tuple[str, Dict[str, Any]]:
    found = []
    for stream in model.survey.streams:
        names, values = agreements(model, stream)
        _, random = agreements(model, stream, random=True)
        for row in range(len(names)):
            for column in range(row):
                if math.isfinite(float(values[row, column])):
                    pair = (names[column], names[row])
                    found.append((float(values[row, column]), float(random[row, column]), pair))
    if not found:
        return "No two modules see the same tokens.", {}
    value, random_value, (first, second) = max(found)
    text = (
        f"{model.label(first)} and {model.label(second)} agree most in whom they choose "
        f"({value:.2f} of 1; random routers in their place: {random_value:.2f})."
    )
    return text, {
        "modules": [first, second],
        "agreement": finite(value),
        "random": finite(random_value),
    }
