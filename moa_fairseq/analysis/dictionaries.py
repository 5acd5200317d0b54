"""Dictionaries for models that see no text."""

from __future__ import annotations

from fairseq.data import Dictionary


def numbered_dictionary(types: int) -> Dictionary:
    """A dictionary of `types` types in all, fairseq's special ones among them."""
    dictionary = Dictionary()
    for number in range(types - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary
