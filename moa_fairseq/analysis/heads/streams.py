"""The tokens that routers see: which are real, where they stand, how frequent they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List

import torch
from torch import Tensor

from ...modules.moa_attention import ENCODER_SELF
from ...modules.moe_feed_forward import ENCODER_FFN
from ...modules.recording import routed_modules
from .context import ModelContext, Sample
from .words import Spelling, WordsOfTokens, WordTable, group_words, spelling

SOURCE, TARGET = "source", "target"

#: The first position of each bin, counted from 1; a bin for the sign that ends a sentence follows.
POSITION_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513)
#: The smallest count of each bin, half a power of ten wide; one for special symbols comes before.
FREQUENCY_EDGES = tuple(round(10 ** (half / 2)) for half in range(19))


def stream_of(kind: str) -> str:
    """Whose tokens a module routes: an encoder's `SOURCE`, or a decoder's `TARGET`."""
    return SOURCE if kind in (ENCODER_SELF, ENCODER_FFN) else TARGET


def position_labels() -> List[str]:
    """Names of position bins, the end of a sentence last."""
    return [*_ranges(POSITION_EDGES), "end"]


def frequency_labels() -> List[str]:
    """Names of frequency bins, special symbols first."""
    return ["special", *_ranges(FREQUENCY_EDGES)]


def _ranges(edges: Any) -> List[str]:
    labels = [
        f"{first:,}" if first == following - 1 else f"{first:,}–{following - 1:,}"
        for first, following in zip(edges, edges[1:])
    ]
    return [*labels, f"{edges[-1]:,}+"]


@dataclass(frozen=True)
class TokenStream:
    """A dictionary and what is known of its pieces.

    Attributes:
        name: `SOURCE` or `TARGET`.
        dictionary: fairseq's.
        spelling: how pieces make words.
        frequency: `[V]` int64, the frequency bin of each piece.
        words: rows of words that were seen; it grows.
    """

    name: str
    dictionary: Any
    spelling: Spelling
    frequency: Tensor
    words: WordTable


@dataclass(frozen=True)
class StreamBatch:
    """The real tokens of a batch, sentence after sentence.

    Attributes:
        real: `[batch, T]` bool, false for padding.
        tokens, sentences, positions, frequencies: `[N]` int64: index in the dictionary, sentence
            of the batch, position bin, frequency bin.
        words: which words they are pieces of.
        num_sentences: of the batch.
    """

    real: Tensor
    tokens: Tensor
    sentences: Tensor
    positions: Tensor
    frequencies: Tensor
    words: WordsOfTokens
    num_sentences: int


def make_streams(context: ModelContext) -> Dict[str, TokenStream]:
    """The streams that the model's routers see."""
    task, options = context.task, context.options
    seen = {stream_of(module.kind) for _, _, module in routed_modules(context.model)}
    dictionaries = {SOURCE: task.source_dictionary, TARGET: task.target_dictionary}
    return {
        name: TokenStream(
            name,
            dictionary,
            spelling(dictionary, options.post_process),
            frequency_bins(dictionary),
            WordTable(options.max_words),
        )
        for name, dictionary in dictionaries.items()
        if name in seen
    }


def frequency_bins(dictionary: Any) -> Tensor:
    """`[V]` int64: the bin of each piece's count in the training data, as the dictionary has it."""
    counts = torch.tensor(dictionary.count[: len(dictionary)])
    bins = torch.bucketize(counts.clamp(min=1), torch.tensor(FREQUENCY_EDGES), right=True)
    for index in range(len(dictionary)):
        if index < dictionary.nspecial or dictionary[index] == "<mask>":
            bins[index] = 0
    return bins


def tokens_of(sample: Sample, name: str) -> Tensor:
    """`[batch, T]` int64: what a stream's routers see of a batch, padding included."""
    net_input = sample["net_input"]
    tokens: Tensor = net_input["src_tokens" if name == SOURCE else "prev_output_tokens"]
    return tokens.cpu()


def read_batch(stream: TokenStream, tokens: Tensor) -> StreamBatch:
    """Sort out the tokens `[batch, T]` of a batch."""
    dictionary = stream.dictionary
    real = tokens.ne(dictionary.pad())
    order = real.cumsum(1)[real]  # counted from 1 within the sentence
    sentences = torch.arange(len(tokens)).unsqueeze(1).expand_as(tokens)[real]
    flat = tokens[real]
    positions = torch.bucketize(order, torch.tensor(POSITION_EDGES), right=True) - 1
    last = order == real.sum(1)[sentences]
    positions[last & (order > 1) & flat.eq(dictionary.eos())] = len(POSITION_EDGES)
    words = group_words(flat, sentences, stream.spelling, stream.words)
    return StreamBatch(real, flat, sentences, positions, stream.frequency[flat], words, len(tokens))
