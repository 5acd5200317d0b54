"""The paper's BLEU: what multi-bleu.perl printed, and a slow version of it."""

from __future__ import annotations

import json
import random

import pytest

from moa_fairseq.errors import UsageError
from moa_fairseq.text.moses import MosesText
from moa_fairseq.text.multi_bleu import multi_bleu, split_compounds
from moa_fairseq.text.tokenised_bleu import (
    figures_of_detokenised,
    figures_of_tokenised,
    parse_language_pair,
)

from ..paths import SHARED
from ..slow_multi_bleu import slow_multi_bleu

MOSES = SHARED / "reference/moses"


def swap_every_fifth(tokens):
    tokens = list(tokens)
    for left in range(4, len(tokens) - 1, 5):
        tokens[left], tokens[left + 1] = tokens[left + 1], tokens[left]
    return tokens


# How each hypothesis of multi_bleu.json comes from its reference.
RULES = {
    "identity": lambda tokens: tokens,
    "drop every 7th token": lambda tokens: [t for n, t in enumerate(tokens, 1) if n % 7],
    "first 12 tokens": lambda tokens: tokens[:12],
    "lower-case": lambda tokens: [token.lower() for token in tokens],
    "repeat the last token": lambda tokens: tokens + tokens[-1:],
    "swap tokens 5,10,15,… with their right neighbour": swap_every_fifth,
}


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_every_line_that_multi_bleu_printed():
    if not MOSES.is_dir():
        pytest.skip(f"no {MOSES}; MOA_SHARED names the folder of corpora and references")
    cases = json.loads((MOSES / "multi_bleu.json").read_text(encoding="utf-8"))
    assert len(cases) == 72
    differing = []
    for case in cases:
        reference = lines(MOSES / case["reference"])
        rule = RULES[case["hypothesis"]]
        hypothesis = [" ".join(rule(line.split(" "))) for line in reference]
        if case["compound_split"]:
            reference, hypothesis = (
                [split_compounds(x) for x in y] for y in (reference, hypothesis)
            )
        ours = multi_bleu(hypothesis, reference).text
        if ours != case["multi_bleu"]:
            differing.append((case, ours))
    assert differing == []


def noisy(generator, tokens):
    """Tokens of a sentence, some lost, doubled or replaced."""
    noise = generator.random()
    kept = []
    for token in tokens:
        chance = generator.random()
        if chance > 0.4 * noise:
            kept.append(token)
        if chance < 0.1 * noise:
            kept += generator.choices(tokens, k=2)
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_slow_version(seed):
    generator = random.Random(seed)
    vocabulary = ["der", "die", "das", "Haus-Bau", "U-Bahn", ",", ".", "rot", "ist", "a-b-c"]
    references, hypotheses = [], []
    for _ in range(generator.randint(1, 12)):
        tokens = generator.choices(vocabulary, k=generator.randint(1, 12))
        references.append(" ".join(tokens))
        hypotheses.append(" ".join(noisy(generator, tokens)))
    hypotheses[0] = hypotheses[0] or references[0]
    assert multi_bleu(hypotheses, references).text == slow_multi_bleu(hypotheses, references)


def test_known_numbers():
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; one word short.
    found = multi_bleu(["the cat sat on a mat"], ["the cat sat on the mat today"])
    assert found.text == (
        "BLEU = 45.48, 83.3/60.0/50.0/33.3 (BP=0.846, ratio=0.857, hyp_len=6, ref_len=7)"
    )
    # Nothing of an order: no smoothing.
    assert multi_bleu(["a b c x"], ["a b c d"]).text == (
        "BLEU = 0.00, 75.0/66.7/50.0/0.0 (BP=1.000, ratio=1.000, hyp_len=4, ref_len=4)"
    )
    # Case counts, and only blanks part words: not a no-break space.
    assert multi_bleu(["A b c d\u00a0e"], ["a b c d\u00a0e"]).text == (
        "BLEU = 0.00, 75.0/66.7/50.0/0.0 (BP=1.000, ratio=1.000, hyp_len=4, ref_len=4)"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("U-Bahn", "U ##AT##-##AT## Bahn"),
        ("- und -", "- und -"),
        ("ein -mal an- aus", "ein -mal an- aus"),
        # The pattern takes the characters beside a hyphen with it: of a-b-c only the first.
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("gut @-@ bekannt", "gut @ ##AT##-##AT## @ bekannt"),
        ("10-%-Marke", "10 ##AT##-##AT## %-Marke"),
    ],
)
def test_splitting_compounds(line, expected):
    assert split_compounds(line) == expected


RAW = ["Die U-Bahn, sagt er, fährt “nicht”.", "Das ist ein Vor-Ort-Termin in Berlin."]
TRANSLATED = ["Die U-Bahn, sagt sie, fährt “nicht”.", "Das ist ein Ort-Termin in Berlin."]


def tokenised(language, raw, aggressive):
    moses = MosesText(language)
    return [moses.tokenize(line, aggressive) for line in raw]


def test_tokenised_text_is_scored_as_by_the_authors_script():
    hypotheses, references = (tokenised("de", raw, True) for raw in (TRANSLATED, RAW))
    # Two quotation marks that match only once they are replaced.
    hypotheses = [line.replace("“", "”") for line in hypotheses]
    split, unsplit = figures_of_tokenised(hypotheses, references, "en-de")
    replaced = [
        [line.replace("“", '"').replace("”", '"') for line in side]
        for side in (hypotheses, references)
    ]
    assert any('"' in line for line in replaced[0])
    twice = [[line.replace(" @-@ ", " @ ##AT##-##AT## @ ") for line in side] for side in replaced]
    assert (split.compound_split, unsplit.compound_split) == (True, False)
    assert split.result.text == slow_multi_bleu(*twice)
    assert unsplit.result.text == slow_multi_bleu(*replaced)
    assert split.result.score != unsplit.result.score
    assert "the paper's figure" in split.note and "the paper's figure" not in unsplit.note


def test_detokenised_text_is_tokenised_and_split_once():
    (figure,) = figures_of_detokenised(TRANSLATED, RAW, "en-de")
    sides = [
        [
            line.replace("-", " ##AT##-##AT## ").replace("“", '" ').replace("”", ' "')
            .replace(",", " ,").replace(".", " .").replace('" .', '" .')
            for line in side
        ]
        for side in (TRANSLATED, RAW)
    ]  # fmt: skip
    assert figure.compound_split
    assert figure.result.text == slow_multi_bleu(*sides)
    assert "the paper's figure" not in figure.note


@pytest.mark.parametrize("pair", ["en-fr", "de-en", "fr-de"])
def test_no_other_pair_is_split(pair):
    language = pair[3:]
    hypotheses, references = (tokenised(language, raw, True) for raw in (TRANSLATED, RAW))
    replaced = [
        [line.replace("“", '"').replace("”", '"') for line in side]
        for side in (hypotheses, references)
    ]
    for figures in (
        figures_of_tokenised(hypotheses, references, pair),
        figures_of_detokenised(TRANSLATED, RAW, pair),
    ):
        assert [figure.compound_split for figure in figures] == [False]
        assert "split" not in figures[0].label + figures[0].note
        assert figures[0].result.text == slow_multi_bleu(*replaced)


def test_language_pairs():
    assert parse_language_pair("en-de") == ("en", "de")
    for wrong in ("ende", "en-", "en-en", "EN-DE", "en-de-fr"):
        with pytest.raises(UsageError, match=f"--language-pair {wrong}: give the codes"):
            parse_language_pair(wrong)
