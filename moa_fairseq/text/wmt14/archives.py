"""The archives of the WMT14 shared tasks: where they are, whether they are whole, what is in them.

Addresses and members are those of the Transformer-Clinic recipe, which the authors used; sizes
and digests are the ones that tensorflow_datasets (sha256) and sacreBLEU (md5 of the test sets)
have on record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, List, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Archive:
    """One downloadable file.

    Attributes:
        name: its file name.
        url: where the shared task keeps it.
        size: bytes.
        digest: `sha256:…` or `md5:…`.
    """

    name: str
    url: str
    size: Optional[int]
    digest: str


@dataclass(frozen=True)
class TextFile:
    """A text in an archive; `{lang}` in `path` stands for the language."""

    name: str
    archive: str
    path: str

    def member(self, language: str, side: str = "") -> str:
        return self.path.format(lang=language, side=side)


@dataclass(frozen=True)
class Pair:
    """What a language pair is made of.

    Attributes:
        source_lang, target_lang: language codes.
        corpora: the training corpora in order.
        valid: the validation set; None where every `valid_every`-th training line is one.
        test: the test set; `{side}` in its path is src or ref.
        pairs: training pairs in the real corpora, for estimates.
    """

    source_lang: str
    target_lang: str
    corpora: Tuple[TextFile, ...]
    valid: Optional[TextFile]
    valid_every: Optional[int]
    test: TextFile
    pairs: int

    @property
    def languages(self) -> Tuple[str, str]:
        return self.source_lang, self.target_lang

    def files(self) -> Tuple[TextFile, ...]:
        return (*self.corpora, *([self.valid] if self.valid else []), self.test)

    def archives(self) -> List[Archive]:
        """The archives that hold the pair's texts, each once."""
        return [ARCHIVES[name] for name in dict.fromkeys(file.archive for file in self.files())]


ARCHIVES: Mapping[str, Archive] = {
    archive.name: archive
    for archive in (
        Archive(
            "training-parallel-europarl-v7.tgz",
            "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
            657632379,
            "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        Archive(
            "training-parallel-commoncrawl.tgz",
            "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
            918311367,
            "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        ),
        Archive(
            "training-parallel-nc-v12.tgz",
            "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
            168591139,
            "sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        ),
        Archive(
            "training-parallel-un.tgz",
            "https://www.statmt.org/wmt13/training-parallel-un.tgz",
            2365634246,
            "sha256:29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
        ),
        Archive(
            "training-parallel-nc-v9.tgz",
            "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
            80418416,
            "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        ),
        Archive(
            "training-giga-fren.tar",
            "https://www.statmt.org/wmt10/training-giga-fren.tar",
            2595102720,
            "sha256:3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
        ),
        Archive(
            "dev.tgz",
            "https://data.statmt.org/wmt19/translation-task/dev.tgz",
            38654961,
            "sha256:7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        ),
        Archive(
            "test-full.tgz",
            "https://www.statmt.org/wmt14/test-full.tgz",
            None,
            "md5:a8cd784e006feb32ac6f3d9ec7eb389a",
        ),
    )
}

_EUROPARL, _CRAWL = "training-parallel-europarl-v7.tgz", "training-parallel-commoncrawl.tgz"
PAIRS: Mapping[str, Pair] = {
    "en-de": Pair(
        "en",
        "de",
        (
            TextFile("europarl-v7", _EUROPARL, "training/europarl-v7.de-en.{lang}"),
            TextFile("commoncrawl", _CRAWL, "commoncrawl.de-en.{lang}"),
            TextFile(
                "news-commentary-v12",
                "training-parallel-nc-v12.tgz",
                "training/news-commentary-v12.de-en.{lang}",
            ),
        ),
        valid=TextFile("newstest2013", "dev.tgz", "dev/newstest2013.{lang}"),
        valid_every=None,
        test=TextFile(
            "newstest2014", "test-full.tgz", "test-full/newstest2014-deen-{side}.{lang}.sgm"
        ),
        pairs=4_590_000,
    ),
    "en-fr": Pair(
        "en",
        "fr",
        (
            TextFile("europarl-v7", _EUROPARL, "training/europarl-v7.fr-en.{lang}"),
            TextFile("commoncrawl", _CRAWL, "commoncrawl.fr-en.{lang}"),
            TextFile("undoc.2000", "training-parallel-un.tgz", "un/undoc.2000.fr-en.{lang}"),
            TextFile(
                "news-commentary-v9",
                "training-parallel-nc-v9.tgz",
                "training/news-commentary-v9.fr-en.{lang}",
            ),
            TextFile(
                "giga-fren.release2",
                "training-giga-fren.tar",
                "giga-fren.release2.fixed.{lang}.gz",
            ),
        ),
        valid=None,
        valid_every=1333,
        test=TextFile(
            "newstest2014", "test-full.tgz", "test-full/newstest2014-fren-{side}.{lang}.sgm"
        ),
        pairs=40_800_000,
    ),
}


def members(pair: Pair, file: TextFile) -> Tuple[str, str]:
    """The paths of a text's two sides in its archive."""
    return (
        file.member(pair.source_lang, "src"),
        file.member(pair.target_lang, "ref"),
    )


def sgm_segments(lines: Iterable[str]) -> List[str]:
    """The segments of an SGM test set in order, as sacreBLEU reads them: entities stay."""
    found = []
    for line in lines:
        match = re.match(r"\s*<seg\b[^>]*>(.*)</seg>", line)
        if match is not None:
            found.append(" ".join(match[1].split()))
    return found
