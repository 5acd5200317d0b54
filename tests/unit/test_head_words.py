"""Pieces and words, tables that do not grow for ever, names of checkpoints, chosen sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary

from moa_fairseq.analysis.heads.context import _chosen, model_names
from moa_fairseq.analysis.heads.counts import with_rows
from moa_fairseq.analysis.heads.streams import (
    FREQUENCY_EDGES,
    frequency_bins,
    frequency_labels,
    position_labels,
)
from moa_fairseq.analysis.heads.words import (
    NO_ROW,
    WordTable,
    find_post_process,
    group_words,
    spelling,
)
from moa_fairseq.errors import UsageError

SENTENCEPIECE = ["▁the", "▁house", "boat", "▁", "s", "▁red", "<mask>"]
SUBWORD_NMT = ["the", "house@@", "boat", "s", "red", "<mask>"]


def dictionary_of(symbols):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


def words_of(symbols, *sentences, limit=100, post_process=None):
    """The word of each occurrence (None where it is not counted), and the table."""
    dictionary = dictionary_of(symbols)
    table = WordTable(limit)
    ids = [[dictionary.index(piece) for piece in pieces.split()] for pieces in sentences]
    tokens = torch.tensor([piece for pieces in ids for piece in pieces])
    which = torch.tensor([row for row, pieces in enumerate(ids) for _ in pieces])
    found = group_words(tokens, which, spelling(dictionary, post_process), table)
    assert len(found.occurrence) == len(tokens)
    names = [None if row == NO_ROW else table.words[row] for row in found.rows.tolist()]
    return [names[occurrence] for occurrence in found.occurrence.tolist()], table


def test_the_way_in_which_pieces_make_words_is_found():
    assert find_post_process(dictionary_of(SENTENCEPIECE)) == "sentencepiece"
    assert find_post_process(dictionary_of(SUBWORD_NMT)) == "subword_nmt"
    assert find_post_process(dictionary_of(["a", "b"])) == "none"


def test_words_of_sentencepiece():
    words, table = words_of(SENTENCEPIECE, "▁the ▁house boat s </s>", "s ▁red ▁ boat </s>")
    assert words == [
        *("the", "houseboats", "houseboats", "houseboats", "</s>"),
        *("s", "red", "boat", "boat", "</s>"),
    ]
    assert table.cut == table.left_out == 0


def test_words_of_subword_nmt():
    # A last piece that asks for more has none in the next sentence.
    words, _ = words_of(SUBWORD_NMT, "the house@@ boat red house@@", "boat house@@ </s>")
    assert words == ["the", "houseboat", "houseboat", "red", "house", "boat", "house", "</s>"]


def test_without_subwords_each_token_is_a_word():
    words, _ = words_of(SENTENCEPIECE, "▁house boat <mask> s", post_process="none")
    assert words == ["house", "boat", "<mask>", "s"]


def test_words_beside_a_mask_or_an_unknown_piece_are_not_whole():
    for hidden in ("<mask>", "<unk>"):
        words, table = words_of(SENTENCEPIECE, f"▁the ▁house {hidden} s ▁red", "▁red ▁red")
        assert words == ["the", None, hidden, None, "red", "red", "red"]
        assert table.cut == 2
    words, _ = words_of(SENTENCEPIECE, "▁the <mask> ▁red")
    assert words == [None, "<mask>", "red"]


def test_words_beyond_the_limit_are_counted_as_left_out():
    words, table = words_of(SENTENCEPIECE, "▁the ▁red ▁house ▁the ▁house boat", limit=2)
    assert words == ["the", "red", None, "the", None, None]
    assert table.words == ["the", "red"] and table.left_out == 2


def test_tables_grow_seldom_and_keep_what_they_have():
    table = torch.ones(4, 2)
    assert with_rows(table, torch.tensor([3])) is table
    grown = with_rows(table, torch.tensor([4, 1]))
    assert grown.shape == (8, 2) and grown.sum() == 8
    assert with_rows(table, torch.tensor([], dtype=torch.long)) is table


def test_bins_of_frequency_are_half_powers_of_ten():
    assert FREQUENCY_EDGES[:6] == (1, 3, 10, 32, 100, 316)
    dictionary = Dictionary()
    for symbol, count in (("once", 1), ("often", 100), ("more", 99), ("<mask>", 50)):
        dictionary.add_symbol(symbol, count)
    labels = [frequency_labels()[row] for row in frequency_bins(dictionary).tolist()]
    assert labels == [*["special"] * 4, "1–2", "100–315", "32–99", "special"]


def test_labels_cover_all_positions():
    labels = position_labels()
    assert labels[:5] == ["1", "2", "3", "4", "5–6"] and labels[-2:] == ["513+", "end"]


@pytest.mark.parametrize(
    "paths, names",
    [
        (["a/checkpoint.pt"], ["a"]),
        (["a/checkpoint.pt", "b/checkpoint.pt"], ["a", "b"]),
        (["a/one.pt", "a/two.pt"], ["one", "two"]),
        (["a/one.pt", "a/two.pt", "b/one.pt"], ["a/one", "a/two", "b/one"]),
    ],
)
def test_checkpoints_are_called_by_what_tells_them_apart(paths, names):
    assert model_names([Path("/x") / path for path in paths]) == names


def test_a_checkpoint_is_given_once():
    with pytest.raises(UsageError, match="given twice"):
        model_names([Path("/x/a.pt"), Path("/x/a.pt")])


def test_chosen_sentences_are_spread_over_the_split():
    batches = [[9, 0, 5], [3, 1], [2, 4, 6, 7, 8]]
    assert _chosen(batches, 4) == [[9, 0], [3], [6]]
    assert _chosen(batches, None) is batches and _chosen(batches, 10) is batches
    assert _chosen(batches, 1) == [[0]]
