"""What is kept of a split: sums, the size of which does not depend on how long the split is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List

import torch
from torch import Tensor

from ...modules.routing import Routing
from .streams import FREQUENCY_EDGES, POSITION_EDGES, StreamBatch
from .words import NO_ROW

POSITIONS = len(POSITION_EDGES) + 1
FREQUENCIES = len(FREQUENCY_EDGES) + 1


def selections(routing: Routing) -> Tensor:
    """`[..., E]` float64: 1 for each of a token's K experts."""
    chosen = torch.zeros(routing.probabilities.shape, dtype=torch.float64)
    return chosen.scatter_(-1, routing.indices, 1.0)


def gate_shares(routing: Routing) -> Tensor:
    """`[..., E]` float64: the share of each expert in the sum of a token's gates."""
    gates = routing.gates.double()
    shares = torch.zeros(routing.probabilities.shape, dtype=torch.float64)
    return shares.scatter_(-1, routing.indices, gates / gates.sum(-1, keepdim=True))


def entropies(routing: Routing) -> Tensor:
    """`[...]` float64, nats: entropy of each token's probabilities over all E experts."""
    return torch.special.entr(routing.probabilities.double()).sum(-1)


def on_cpu(routing: Routing, real: Tensor) -> Routing:
    """The routing of the real tokens `[N, ...]`, detached, in main memory."""
    return Routing(*(part.detach().cpu()[real] for part in routing))


@dataclass
class RatioSums:
    """Sums over sentences of a quantity y and of their number of tokens n.

    From them follow Σy/Σn and an interval that respects that the tokens of a sentence belong
    together (statistics.py).

    Attributes:
        y, yy, yn: `[...]` float64: Σy, Σy², Σy·n.
        n, nn, sentences: Σn, Σn², the number of sentences.
    """

    y: Tensor
    yy: Tensor
    yn: Tensor
    n: float = 0.0
    nn: float = 0.0
    sentences: int = 0

    @classmethod
    def zeros(cls, size: int) -> RatioSums:
        return cls(_zeros(size), _zeros(size), _zeros(size))

    def add(self, values: Tensor, batch: StreamBatch) -> None:
        """Add the tokens of a batch; `values` is `[N, size]`."""
        sums = torch.zeros(batch.num_sentences, values.shape[1], dtype=torch.float64)
        sums.index_add_(0, batch.sentences, values)  # [sentences, size]
        lengths = batch.real.sum(1).double()  # [sentences]
        self.y += sums.sum(0)
        self.yy += sums.square().sum(0)
        self.yn += lengths @ sums
        self.n += float(lengths.sum())
        self.nn += float(lengths.square().sum())
        self.sentences += batch.num_sentences


class StreamTotals:
    """How many tokens of each sort a stream has.

    Attributes:
        tokens, sentences: how many.
        pieces `[V]`, positions, frequencies, words: float64 counts of tokens by row.
    """

    def __init__(self, types: int) -> None:
        self.tokens = 0
        self.sentences = 0
        self.pieces = _zeros(types)
        self.positions = _zeros(POSITIONS)
        self.frequencies = _zeros(FREQUENCIES)
        self.words = _zeros(0)

    def add(self, batch: StreamBatch) -> None:
        ones = torch.ones(len(batch.tokens), dtype=torch.float64)
        self.tokens += len(ones)
        self.sentences += batch.num_sentences
        self.pieces.index_add_(0, batch.tokens, ones)
        self.positions.index_add_(0, batch.positions, ones)
        self.frequencies.index_add_(0, batch.frequencies, ones)
        rows = batch.words.rows[batch.words.rows != NO_ROW]
        self.words = with_rows(self.words, rows)
        self.words.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))


class RouterTotals:
    """What a router did with the tokens of a split.

    Its `mass` is what it gives a token's experts: 1 to each of the K that are selected; where
    nothing is selected (K = E) the shares of the gates, which sum to 1.

    Attributes:
        num_experts, num_selected: E, K.
        selected, gates, entropy: over sentences: of selections `[E]`, of gate shares `[E]`, and of
            the probabilities' entropy in nats `[1]`.
        pairs: `[E, E]`, Σ mass·massᵀ over tokens.
        token_entropy: Σ over tokens of the entropy of mass/Σmass, in nats.
        pieces `[V, E]`, positions, frequencies, words: Σ mass by row; a word's mass is the mean of
            its pieces'.
    """

    def __init__(self, num_experts: int, num_selected: int, types: int) -> None:
        self.num_experts = num_experts
        self.num_selected = num_selected
        self.selected = RatioSums.zeros(num_experts)
        self.gates = RatioSums.zeros(num_experts)
        self.entropy = RatioSums.zeros(1)
        self.pairs = _zeros(num_experts, num_experts)
        self.token_entropy = 0.0
        self.pieces = _zeros(types, num_experts)
        self.positions = _zeros(POSITIONS, num_experts)
        self.frequencies = _zeros(FREQUENCIES, num_experts)
        self.words = _zeros(0, num_experts)

    @property
    def selects(self) -> bool:
        """Whether there is anything to select: K < E."""
        return self.num_selected < self.num_experts

    @property
    def mass_of_token(self) -> float:
        """What the experts of one token get together: K, or 1 where nothing is selected."""
        return float(self.num_selected) if self.selects else 1.0

    def add(self, routing: Routing, batch: StreamBatch) -> Tensor:
        """Add the routing of a batch's real tokens `[N, ...]`; returns their mass `[N, E]`."""
        selected, gates = selections(routing), gate_shares(routing)
        mass = selected if self.selects else gates
        self.selected.add(selected, batch)
        self.gates.add(gates, batch)
        self.entropy.add(entropies(routing).unsqueeze(1), batch)
        self.pairs += mass.T @ mass
        self.token_entropy += float(torch.special.entr(mass / self.mass_of_token).sum())
        self.pieces.index_add_(0, batch.tokens, mass)
        self.positions.index_add_(0, batch.positions, mass)
        self.frequencies.index_add_(0, batch.frequencies, mass)
        self._add_words(mass, batch)
        return mass

    def _add_words(self, mass: Tensor, batch: StreamBatch) -> None:
        occurrence, rows = batch.words.occurrence, batch.words.rows
        sums = _zeros(len(rows), self.num_experts).index_add_(0, occurrence, mass)
        pieces = torch.bincount(occurrence, minlength=len(rows)).unsqueeze(1)  # [W, 1]
        counted = rows != NO_ROW
        self.words = with_rows(self.words, rows[counted])
        self.words.index_add_(0, rows[counted], (sums / pieces)[counted])


@dataclass
class Survey:
    """Everything that is kept of one model's run over a split.

    Attributes:
        streams: by stream.
        words: texts of the rows of words, by stream.
        left_out, cut: occurrences of words without a row, and of words that are not whole.
        modules: names of routed modules in the order of the model, and each one's kind.
        trained, random: totals of each module's router, and of a random one that saw the same.
        joint, random_joint: `[E, E']`, Σ mass·mass'ᵀ of two modules of a stream, by their names.
    """

    streams: Dict[str, StreamTotals] = field(default_factory=dict)
    words: Dict[str, List[str]] = field(default_factory=dict)
    left_out: Dict[str, int] = field(default_factory=dict)
    cut: Dict[str, int] = field(default_factory=dict)
    modules: Dict[str, str] = field(default_factory=dict)
    trained: Dict[str, RouterTotals] = field(default_factory=dict)
    random: Dict[str, RouterTotals] = field(default_factory=dict)
    joint: Dict[tuple, Tensor] = field(default_factory=dict)
    random_joint: Dict[tuple, Tensor] = field(default_factory=dict)


def with_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table` with zeros after its last row, where it is too short for `rows`."""
    needed = int(rows.max()) + 1 if rows.numel() else 0
    if needed <= len(table):
        return table
    size = max(needed, 2 * len(table))  # seldom, though words keep coming
    return torch.cat((table, _zeros(size - len(table), *table.shape[1:])))


def _zeros(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)
