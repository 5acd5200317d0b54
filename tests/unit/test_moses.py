"""Moses' steps against what its own Perl scripts print."""

from __future__ import annotations

import pytest
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer as FairseqMoses
from fairseq.data.encoders.moses_tokenizer import MosesTokenizerConfig

from moa_fairseq.text.moses import MosesText

from ..paths import SHARED

STEPS = {
    # output of Perl: (its input, ours)
    "normalised": (None, lambda moses, line: moses.normalize(line)),
    "normalised.tok": ("normalised", lambda moses, line: moses.tokenize(line, True)),
    "raw.tok": (None, lambda moses, line: moses.tokenize(line, True)),
    "raw.tok-plain": (None, lambda moses, line: moses.tokenize(line, False)),
    "raw.tok.unicode-replaced": (
        "raw.tok",
        lambda moses, line: moses.replace_unicode_punctuation(line),
    ),
    "normalised.detok": ("normalised.tok", lambda moses, line: moses.detokenize(line)),
}


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("pair", "language"), [("en-de", "en"), ("en-de", "de"), ("en-fr", "fr")])
def test_no_line_of_newstest2013_differs_from_perl(pair, language, step):
    folder = SHARED / "reference/moses"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; MOA_SHARED names the folder of corpora and references")
    source, ours = STEPS[step]
    given = lines(
        SHARED / f"data/newstest-{pair}/valid.{language}"
        if source is None
        else folder / f"{pair}.{language}.{source}"
    )
    expected = lines(folder / f"{pair}.{language}.{step}")
    moses = MosesText(language)
    assert len(given) == len(expected) == 3000
    differing = [
        (number, made, perl)
        for number, (line, perl) in enumerate(zip(given, expected), start=1)
        for made in [ours(moses, line)]
        if made != perl
    ]
    assert differing == []


# What the rules of normalize-punctuation.perl and remove-non-printing-char.perl say.
NORMALIZED = [
    # German moves a full stop out of quotation marks, also at the end of the line.
    ("de", "Er sagte: „Nein.“", 'Er sagte: "Nein".'),
    ("de", '"Ja," sagte sie.', '"Ja", sagte sie.'),
    ("en", "He said “no”.", 'He said "no."'),
    ("fr", "Il a dit «\u00a0non\u00a0».", 'Il a dit "non".'),
    ("en", "It’s 5 ‘o’ clock – now…", "It's 5 'o' clock - now..."),
    ("en", "see (below )here", "see (below) here"),
    ("de", "1\u00a0234 und 1,5", "1,234 und 1,5"),
    ("en", "1\u00a0234", "1.234"),
    ("en", "10 % of it", "10% of it"),
    ("en", "a\u00adb\u200bc\u0007d", "a b c d"),
]


@pytest.mark.parametrize(("language", "line", "expected"), NORMALIZED)
def test_normalizing(language, line, expected):
    assert MosesText(language).normalize(line) == expected


# What the rules of tokenizer.perl say; the last column with -a.
TOKENIZED = [
    ("en", "well-known co-ops", "well-known co-ops", "well @-@ known co @-@ ops"),
    ("en", "It isn't John's.", "It isn &apos;t John &apos;s .", None),
    ("fr", "l'homme d'aujourd'hui", "l&apos; homme d&apos; aujourd&apos; hui", None),
    ("de", "Das ist's.", "Das ist &apos; s .", None),
    ("en", "1,000.5 and 3, 4", "1,000.5 and 3 , 4", None),
    # The last word's full stop stands alone, also that of an abbreviation.
    ("en", "Mr. Smith met Mr.", "Mr. Smith met Mr .", None),
    ("de", "Es kostet ca. 5 usw.", "Es kostet ca. 5 usw .", None),
    ("en", "AT&T | [a] <b>", "AT &amp; T &#124; &#91; a &#93; &lt; b &gt;", None),
    ("en", "Wait... what?", "Wait ... what ?", None),
    ("en", 'the "end"', "the &quot; end &quot;", None),
]


@pytest.mark.parametrize(("language", "line", "plain", "aggressive"), TOKENIZED)
def test_tokenizing(language, line, plain, aggressive):
    moses = MosesText(language)
    assert moses.tokenize(line, False) == plain
    assert moses.tokenize(line, True) == (aggressive or plain)


def test_unicode_punctuation_and_back():
    moses = MosesText("de")
    assert moses.replace_unicode_punctuation("“a“，b。… c") == '"a",b. ... c'
    assert moses.detokenize("Er sagte : &quot; Nein &quot; .") == 'Er sagte: "Nein".'


@pytest.mark.parametrize(("pair", "language"), [("en-de", "de"), ("en-fr", "fr")])
def test_fairseqs_encoder_detokenises_alike_given_the_language(pair, language):
    path = SHARED / f"reference/moses/{pair}.{language}.raw.tok"
    if not path.is_file():
        pytest.skip(f"no {path}; MOA_SHARED names the folder of corpora and references")
    decode = [
        FairseqMoses(MosesTokenizerConfig(source_lang="en", target_lang=target)).decode
        for target in (language, "en")
    ]
    moses = MosesText(language)
    text = lines(path)
    ours = [moses.detokenize(line) for line in text]
    assert ours == [decode[0](line) for line in text]
    # With the language left out it is English's, which is why moa-score compares every line.
    assert ours != [decode[1](line) for line in text]
