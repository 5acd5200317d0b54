"""Losses and translations of a fixed sample of sentences, with experts masked out or not."""

from __future__ import annotations

import hashlib
import operator
import random
from contextlib import nullcontext
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqEncoderDecoderModel, FairseqEncoderModel
from torch import Tensor

from ..errors import UsageError
from ..modules.masking import without_experts
from ..modules.moa_attention import ENCODER_SELF
from ..modules.moe_feed_forward import ENCODER_FFN
from ..modules.recording import RoutedModule, record_routings, routed_modules
from ..modules.router_losses import expert_counts
from ..modules.routing import Routing
from .text_codec import TextCodec


class Load(NamedTuple):
    """What a router gave to the experts of a module over the sample; padding counts for nothing.

    Attributes:
        tokens: that were routed.
        selections: `[E]`, how many of them selected each expert.
        gates: `[E]`, sum of each expert's gates.
    """

    tokens: int
    selections: np.ndarray
    gates: np.ndarray


def load_of(routing: Routing, padding: Tensor) -> Load:
    """The load of one batch.

    Args:
        routing: of `[batch, length]` tokens.
        padding: `[batch, length]` bool, true where a token is padding.
    """
    selections = expert_counts(routing, padding)  # [E]
    gates = routing.gates.masked_fill(padding.unsqueeze(-1), 0.0).double()  # [batch, length, K]
    mass = gates.new_zeros(len(selections))
    mass.index_add_(0, routing.indices.reshape(-1), gates.reshape(-1))
    return Load(int((~padding).sum()), selections.cpu().numpy(), mass.cpu().numpy())


def negative_log_likelihoods(
    model: Any, sample: Dict[str, Any], padding_index: int, encoder_out: Any = None
) -> Tuple[Tensor, Tensor]:
    """-log p of the target tokens, without label smoothing or router terms, summed by sentence.

    For a masked language model the target tokens are the masked ones, as its task collates them.

    Args:
        model: an encoder-decoder or an encoder of fairseq, in evaluation.
        sample: a batch of its task, on the model's device.
        padding_index: marks in `sample["target"]` what is not scored.
        encoder_out: of an encoder-decoder's encoder for this batch; None runs the encoder.

    Returns:
        nats `[batch]` float64, and how many tokens were scored, `[batch]` int64.
    """
    scored = sample["target"].ne(padding_index)  # [batch, T]
    inputs = sample["net_input"]
    if isinstance(model, FairseqEncoderModel):
        net_output = model(**inputs, masked_tokens=scored)  # logits of the scored tokens only
        log_probabilities = model.get_normalized_probs(net_output, True, sample)
        log_probabilities = log_probabilities.reshape(-1, log_probabilities.shape[-1])
    else:
        if encoder_out is None:
            net_output = model(**inputs)
        else:
            net_output = model.decoder(
                inputs["prev_output_tokens"],
                encoder_out=encoder_out,
                src_lengths=inputs["src_lengths"],
            )
        log_probabilities = model.get_normalized_probs(net_output, True, sample)[scored]
    losses = -log_probabilities.gather(1, sample["target"][scored].unsqueeze(1)).squeeze(1)
    rows = scored.nonzero()[:, 0]
    sums = losses.new_zeros(len(scored), dtype=torch.float64)
    return sums.index_add_(0, rows, losses.double()), scored.sum(dim=1)


def sample_indices(task: Any, model: Any, subset: str, sentences: int, seed: int) -> List[int]:
    """A seeded sample of a loaded split: `sentences` indices in random order.

    Sentences that the model has no positions for are never drawn; a split with fewer is taken
    whole.
    """
    dataset = task.dataset(subset)
    longest = utils.resolve_max_positions(task.max_positions(), model.max_positions())
    with data_utils.numpy_seed(seed):
        candidates = np.sort(dataset.ordered_indices())
    fitting, _ = dataset.filter_indices_by_size(candidates, longest)
    drawn = sorted(int(index) for index in fitting)
    random.Random(seed).shuffle(drawn)
    return drawn[:sentences]


class Subject:
    """A model and a fixed sample of sentences that it is measured on, with any expert masked.

    Losses are in the order of `indices`. Where the masked module is in the decoder, the results
    of the encoder, which cannot depend on it, are those of the first pass.

    Args:
        model: of fairseq; it is put in evaluation.
        task: of fairseq, with `subset` loaded.
        subset: of the data.
        indices: the sentences.
        max_tokens: in a batch, padding included.

    Attributes:
        digest: of the tokens of the sample.
        losses: `[n]` nats of the sentences, with all experts.
        tokens: `[n]` scored tokens.
        loads: by name of module.

    Raises:
        UsageError: where the sample has no token to score.
    """

    def __init__(
        self, model: Any, task: Any, subset: str, indices: Sequence[int], max_tokens: int
    ) -> None:
        self.model = model.eval()
        self.modules = {name: module for name, _, module in routed_modules(model)}
        self.padding_index = task.target_dictionary.pad()
        dataset = task.dataset(subset)
        dataset.set_epoch(1)  # the masks of masked language modelling follow the epoch
        self.samples = batches(dataset, indices, max_tokens, next(model.parameters()).device)
        places = {index: place for place, index in enumerate(indices)}
        self.places = [
            [places[index] for index in sample["id"].tolist()] for sample in self.samples
        ]
        self.count = len(indices)
        self.digest = digest(self.samples)
        self.encoder_outs: List[Any] = [None] * len(self.samples)
        self._selected: List[Dict[str, np.ndarray]] = []
        self._baseline()

    @torch.no_grad()
    def _baseline(self) -> None:
        model = self.model
        self.loads = {
            name: Load(0, np.zeros(module.num_experts), np.zeros(module.num_experts))
            for name, module in self.modules.items()
        }
        self.losses, self.tokens = np.zeros(self.count), np.zeros(self.count, dtype=np.int64)
        for number, sample in enumerate(self.samples):
            with record_routings(model) as recorded:
                if isinstance(model, FairseqEncoderDecoderModel):
                    self.encoder_outs[number] = model.encoder(
                        sample["net_input"]["src_tokens"],
                        src_lengths=sample["net_input"]["src_lengths"],
                    )
                sums, scored = self._losses_of(number, reuse=True)
            self.losses[self.places[number]] = sums
            self.tokens[self.places[number]] = scored
            selected = {}
            for name, kind, _, routing in recorded:
                load = load_of(routing, _padding(sample, kind, self.padding_index))
                self.loads[name] = Load(*map(operator.add, self.loads[name], load))
                selected[name] = load.selections > 0
            self._selected.append(selected)
        if not self.tokens.any():
            raise UsageError(
                f"the sample of {self.count} sentences has no token to score; raise "
                "--importance, or give another --subset"
            )

    @torch.no_grad()
    def loss_changes(self, name: str, experts: Sequence[int]) -> List[float]:
        """By how many nats masking experts of a module changes the loss of each sentence.

        Args:
            name: of the module.
            experts: those to mask; see :func:`~moa_fairseq.modules.masking.without_experts`.
        """
        module = self.modules[name]
        reuse = name.startswith("decoder.")
        changes = np.zeros(self.count)
        for number, places in enumerate(self.places):
            # No token of the batch selects them: nothing would change.
            if not self._selected[number][name][list(experts)].any():
                continue
            with without_experts(module, experts):
                sums, _ = self._losses_of(number, reuse)
            changes[places] = sums - self.losses[places]
        return changes.tolist()

    def _losses_of(self, number: int, reuse: bool) -> Tuple[np.ndarray, np.ndarray]:
        encoder_out = self.encoder_outs[number] if reuse else None
        sums, scored = negative_log_likelihoods(
            self.model, self.samples[number], self.padding_index, encoder_out
        )
        return sums.cpu().numpy(), scored.cpu().numpy()


class Translator:
    """Translations of a fixed sample by beam search through the task's generator.

    Args:
        model, task, subset, indices, max_tokens: as of :class:`Subject`.
        codec: for detokenised text.
        beam, lenpen: of the search.

    Attributes:
        references: detokenised targets of the data, in the order of `indices`.
    """

    def __init__(
        self,
        model: Any,
        task: Any,
        subset: str,
        indices: Sequence[int],
        max_tokens: int,
        codec: TextCodec,
        beam: int,
        lenpen: float,
    ) -> None:
        self.model, self.task, self.codec = model.eval(), task, codec
        self.indices = list(indices)
        self.dictionary = task.target_dictionary
        device = next(model.parameters()).device
        self.samples = batches(task.dataset(subset), indices, max_tokens, device)
        self.generator = task.build_generator([model], GenerationConfig(beam=beam, lenpen=lenpen))
        found = {}
        for sample in self.samples:
            for index, target in zip(sample["id"].tolist(), sample["target"]):
                found[index] = codec.text_of(self.dictionary, target, reference=True)
        self.references = [found[index] for index in self.indices]

    def translate(
        self, module: Optional[RoutedModule] = None, experts: Sequence[int] = ()
    ) -> List[str]:
        """Detokenised best hypotheses, with experts of a module masked out where one is given."""
        context: ContextManager[None] = nullcontext()
        found = {}
        for sample in self.samples:
            if module is not None:
                context = without_experts(module, experts)
            with context:
                hypotheses = self.task.inference_step(self.generator, [self.model], sample)
            for index, best in zip(sample["id"].tolist(), hypotheses):
                found[index] = self.codec.text_of(self.dictionary, best[0]["tokens"])
        return [found[index] for index in self.indices]


def batches(
    dataset: Any, indices: Sequence[int], max_tokens: int, device: torch.device
) -> List[Dict[str, Any]]:
    """Collated batches of some sentences, those of like length together, on a device."""
    by_size = sorted(indices, key=lambda index: (dataset.num_tokens(index), index))
    groups: List[List[int]] = []
    for index in by_size:
        # The sentence that comes last is the longest, and the others are padded to it.
        if groups and (len(groups[-1]) + 1) * dataset.num_tokens(index) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    samples = [dataset.collater([dataset[index] for index in group]) for group in groups]
    return [utils.apply_to_sample(lambda tensor: tensor.to(device), sample) for sample in samples]


def digest(samples: Sequence[Dict[str, Any]]) -> str:
    """Hex digest of what a model sees of batches, and of their targets."""
    result = hashlib.sha256()
    for sample in samples:
        for name in ("src_tokens", "prev_output_tokens"):
            if name in sample["net_input"]:
                result.update(sample["net_input"][name].cpu().numpy().tobytes())
        result.update(sample["target"].cpu().numpy().tobytes())
    return result.hexdigest()


def _padding(sample: Dict[str, Any], kind: str, padding_index: int) -> Tensor:
    """`[batch, length]`, which queries of a kind of module are padding."""
    encoder = kind in (ENCODER_SELF, ENCODER_FFN)
    tokens = sample["net_input"]["src_tokens" if encoder else "prev_output_tokens"]
    return tokens.eq(padding_index)
