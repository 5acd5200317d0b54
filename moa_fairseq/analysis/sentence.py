"""One sentence in a model: which experts each token uses, and what their heads attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

from ..errors import UsageError
from ..modules.moa_attention import CROSS, ENCODER_SELF, MixtureOfAttentionHeads
from ..modules.moe_feed_forward import ENCODER_FFN
from ..modules.recording import (
    record_head_weights,
    record_routings,
    routed_modules,
)
from .text_codec import TextCodec

#: Longer sentences make pictures that nobody can read.
MOST_TOKENS = 128
MASK = "<mask>"
MAPS_OF_LAST_LAYER, MAPS_OF_ALL = "last", "all"


@dataclass(frozen=True)
class SentenceOptions:
    """Which sentence, and what to show of it.

    Attributes:
        source: raw text; for a masked language model, `<mask>` in it is the mask.
        target: raw text; None takes the model's own translation.
        maps: whose attention is drawn: `last` (the modules of the last layers), `all`, or names
            of modules with commas between them.
        beam, lenpen: of the search for the model's own translation.
    """

    source: str
    target: Optional[str] = None
    maps: str = MAPS_OF_LAST_LAYER
    beam: int = 5
    lenpen: float = 1.0

    def __post_init__(self) -> None:
        for flag, text in (("--sentence", self.source), ("--sentence-target", self.target)):
            if text is not None and not text.strip():
                raise UsageError(f"{flag} is empty; give a sentence, or leave the option out")


@dataclass(frozen=True)
class ModuleView:
    """What a routed module did with the sentence.

    Attributes:
        name, kind, position: as in a `RecordedRouting`.
        experts: E.
        heads: H of each expert; 0 for a mixture of feed-forwards.
        queries: labels of its T tokens; in a decoder the token that goes in and, after an arrow,
            the one that is to come out.
        keys: labels of the S tokens that it attends to; none for a mixture of feed-forwards.
        indices: `[T, K]` int64, the experts that each token selected.
        gates: `[T, K]`.
        weights: `[T, K, H, S]`, what each head of each of them attends to; None for a mixture of
            feed-forwards.
    """

    name: str
    kind: str
    position: int
    experts: int
    heads: int
    queries: Tuple[str, ...]
    keys: Tuple[str, ...]
    indices: Tensor
    gates: Tensor
    weights: Optional[Tensor]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.position}"


@dataclass(frozen=True)
class SentenceView:
    """A sentence as a model saw it.

    Attributes:
        source, target: raw text; target is None for a model without a decoder.
        own_translation: whether the target is what the model made of the source.
        source_tokens, target_tokens: pieces, special symbols included.
        modules: in the order in which they ran.
    """

    source: str
    target: Optional[str]
    own_translation: bool
    source_tokens: Tuple[str, ...]
    target_tokens: Tuple[str, ...]
    modules: Tuple[ModuleView, ...]


def view_sentence(
    model: Any, task: Any, options: SentenceOptions, codec: TextCodec
) -> SentenceView:
    """Run a model over one sentence and note what its routers and heads do.

    Args:
        model: an encoder-decoder or an encoder of fairseq, with routed modules.
        task: of fairseq.
        options: see there.
        codec: turns raw text into the model's pieces.

    Raises:
        UsageError: for a target where the model has no decoder, for a sentence that is too long,
            and for a model without routed modules.
    """
    if not list(routed_modules(model)):
        raise UsageError("this model has no routed module, so there is nothing to show; give a MoA")
    model.eval()
    device = next(model.parameters()).device
    if not isinstance(model, FairseqEncoderDecoderModel):
        if options.target is not None:
            raise UsageError("--sentence-target: this model has no target; leave the option out")
        dictionary = task.source_dictionary
        source = encode_with_masks(options.source, task, codec)
        _check_length("--sentence", source)
        inputs = {"src_tokens": source.unsqueeze(0).to(device)}
        labels = _labels(dictionary, source)
        modules = _run(model, {**inputs, "src_lengths": _length(source, device)}, labels, (), ())
        return SentenceView(options.source, None, False, labels, (), modules)

    source = _encode(task.source_dictionary, codec, options.source)
    _check_length("--sentence", source)
    net_input = {
        "src_tokens": source.unsqueeze(0).to(device),
        "src_lengths": _length(source, device),
    }
    dictionary = task.target_dictionary
    if options.target is None:
        generator = task.build_generator(
            [model], GenerationConfig(beam=options.beam, lenpen=options.lenpen)
        )
        hypotheses = task.inference_step(generator, [model], {"net_input": net_input})
        target = hypotheses[0][0]["tokens"].cpu()
        text = codec.text_of(dictionary, target)
    else:
        target, text = _encode(dictionary, codec, options.target), options.target
    _check_length(
        "--sentence-target" if options.target else "the translation of --sentence", target
    )
    previous = collate_tokens(
        [target], dictionary.pad(), dictionary.eos(), move_eos_to_beginning=True
    )
    net_input["prev_output_tokens"] = previous.to(device)
    source_labels = _labels(task.source_dictionary, source)
    modules = _run(
        model,
        net_input,
        source_labels,
        _labels(dictionary, previous[0]),
        _labels(dictionary, target),
    )
    return SentenceView(
        options.source,
        text,
        options.target is None,
        source_labels,
        _labels(dictionary, target),
        modules,
    )


def encode_with_masks(text: str, task: Any, codec: TextCodec) -> Tensor:
    """Indices of raw text in which `<mask>` stands for masks, as its task feeds an encoder.

    Args:
        text: raw.
        task: of masked language modelling.
        codec: sees the text between the masks only.

    Returns:
        `[length]` int64, from the beginning of the sentence to its end.
    """
    dictionary = task.source_dictionary
    pieces = f" {MASK} ".join(codec.encode(part.strip()) for part in text.split(MASK))
    tokens = dictionary.encode_line(pieces, append_eos=True, add_if_not_exist=False).long()
    return torch.cat((tokens.new_tensor([dictionary.bos()]), tokens))


def chosen_for_maps(view: SentenceView, maps: str) -> List[ModuleView]:
    """The modules whose attention is drawn; see :class:`SentenceOptions`.

    Raises:
        UsageError: for a name that no attention of the model has.
    """
    attentions = [module for module in view.modules if module.weights is not None]
    if maps == MAPS_OF_ALL:
        return attentions
    if maps == MAPS_OF_LAST_LAYER:
        last = {module.kind: module for module in attentions}
        return [module for module in attentions if last[module.kind] is module]
    named = {module.name: module for module in attentions}
    wanted = [name.strip() for name in maps.split(",")]
    for name in wanted:
        if name not in named:
            raise UsageError(
                f"--sentence-maps {name}: no such attention; give {MAPS_OF_LAST_LAYER}, "
                f"{MAPS_OF_ALL}, or some of {', '.join(named)}"
            )
    return [named[name] for name in wanted]


@torch.no_grad()
def _run(
    model: Any,
    net_input: Dict[str, Tensor],
    source: Tuple[str, ...],
    previous: Tuple[str, ...],
    target: Tuple[str, ...],
) -> Tuple[ModuleView, ...]:
    with record_routings(model) as routings, record_head_weights(model) as head_weights:
        model(**net_input)
    modules = {name: module for name, _, module in routed_modules(model)}
    weights = {entry.name: entry.weights for entry in head_weights}
    steps = tuple(f"{before} → {after}" for before, after in zip(previous, target))
    views = []
    for name, kind, position, routing in routings:
        module = modules[name]
        heads = 0
        by_head: Optional[Tensor] = None
        keys: Tuple[str, ...] = ()
        if isinstance(module, MixtureOfAttentionHeads):
            heads = module.heads_per_expert
            _, _, queries, width = weights[name].shape
            by_head = weights[name][:, 0].view(-1, heads, queries, width).permute(2, 0, 1, 3).cpu()
            # With --cross-self-attention, a decoder's keys begin with the source.
            keys = source if kind in (ENCODER_SELF, CROSS) else (*source, *previous)[-width:]
        views.append(
            ModuleView(
                name,
                kind,
                position,
                module.num_experts,
                heads,
                source if kind in (ENCODER_SELF, ENCODER_FFN) else steps,
                keys,
                routing.indices[0].cpu(),
                routing.gates[0].cpu(),
                by_head,
            )
        )
    return tuple(views)


def _encode(dictionary: Any, codec: TextCodec, text: str) -> Tensor:
    return dictionary.encode_line(codec.encode(text), add_if_not_exist=False).long()


def _labels(dictionary: Any, tokens: Tensor) -> Tuple[str, ...]:
    return tuple(dictionary[int(token)] for token in tokens)


def _length(tokens: Tensor, device: torch.device) -> Tensor:
    return torch.tensor([len(tokens)], device=device)


def _check_length(what: str, tokens: Tensor) -> None:
    if len(tokens) > MOST_TOKENS:
        raise UsageError(
            f"{what} has {len(tokens)} tokens, and a picture holds {MOST_TOKENS}; give a shorter "
            "sentence"
        )
