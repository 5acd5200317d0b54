"""Moses' text processing as its Perl scripts do it: sacremoses with its differences mended."""

from __future__ import annotations

import re

import regex
import sacremoses


class MosesText:
    """The Moses steps for one language, each line for line what its Perl script prints.

    Args:
        language: code of the language, which decides on quotes, non-breaking prefixes and
            apostrophes.
    """

    def __init__(self, language: str) -> None:
        self._normalizer = PunctuationNormalizer(language)
        self._tokenizer = Tokenizer(language)
        self._detokenizer = sacremoses.MosesDetokenizer(language)

    def normalize(self, line: str) -> str:
        """normalize-punctuation.perl, then remove-non-printing-char.perl."""
        return regex.sub(r"\p{C}", " ", self._normalizer.normalize(line))

    def tokenize(self, line: str, aggressive: bool) -> str:
        """tokenizer.perl; `aggressive` is its `-a`, which makes hyphens tokens, ` @-@ `."""
        return self._tokenizer.tokenize(line, aggressive_dash_splits=aggressive, return_str=True)

    def replace_unicode_punctuation(self, line: str) -> str:
        """replace-unicode-punctuation.perl."""
        return self._normalizer.replace_unicode_punct(line)

    def detokenize(self, line: str) -> str:
        """detokenizer.perl."""
        return self._detokenizer.detokenize(line.split(" "))


class PunctuationNormalizer(sacremoses.MosesPunctNormalizer):
    """normalize-punctuation.perl.

    Perl's rules see the line with its line feed: a rule that moves a full stop before a closing
    quotation mark needs a character after it, and a blank at the end stays. sacremoses strips
    the line instead.
    """

    def normalize(self, text: str) -> str:
        line = text + "\n"
        for pattern, replacement in self.substitutions:
            line = re.sub(pattern, replacement, line)
        return line[:-1] if line.endswith("\n") else line


class Tokenizer(sacremoses.MosesTokenizer):
    """tokenizer.perl.

    Perl parts the full stop of a line's last word whatever the word is; sacremoses keeps it
    where the word is an abbreviation.
    """

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        parted: str = super().handles_nonbreaking_prefixes(re.sub(r"(\S)\.\s*$", r"\1 .", text))
        return parted
