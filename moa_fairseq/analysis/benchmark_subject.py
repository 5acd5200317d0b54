"""One model under measurement: a training step, beam search, one attention module, its memory.

Everything runs as fairseq runs it: the model from its architecture, its `Trainer`, its
`SequenceGenerator`. Text is drawn at random, the same for every model.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.models.transformer import TransformerModelBase
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from torch import Tensor, nn

from ..errors import UsageError
from ..modules.moa_attention import MixtureOfAttentionHeads
from .dictionaries import numbered_dictionary

PRECISIONS = ("float32", "bfloat16", "amp")


@dataclass(frozen=True)
class Setting:
    """What every model of a comparison shares.

    Attributes:
        device: `cpu` or `cuda`.
        precision: `float32`; `bfloat16` for all weights; `amp` for fairseq's mixed precision.
        vocab_size: types in the joint dictionary.
        tokens: target tokens in a batch of training.
        length: mean length of a sentence in tokens; lengths differ by 2 at most.
        beam: hypotheses of a sentence in generation.
        module_batch, module_length: of the attention module that is measured alone.
        compiled: put what is measured through `torch.compile` first.
    """

    device: str = "cpu"
    precision: str = "float32"
    vocab_size: int = 8000
    tokens: int = 2048
    length: int = 30
    beam: int = 5
    module_batch: int = 64
    module_length: int = 30
    compiled: bool = False


class Subject:
    """A model and what is needed to train it and to translate with it.

    Args:
        words: options of fairseq-train that make the model, `--arch` first.
        setting: the conditions.
    """

    def __init__(self, words: List[str], setting: Setting) -> None:
        logging.disable(logging.INFO)
        self.setting = setting
        self.device = torch.device(setting.device)
        self.dictionary = numbered_dictionary(setting.vocab_size)
        self.cfg = _config(words, setting)
        self.task = TranslationTask(self.cfg.task, self.dictionary, self.dictionary)
        torch.manual_seed(1)
        self.model = self.task.build_model(self.cfg.model)
        if not isinstance(self.model, TransformerModelBase):
            raise UsageError(f"--arch {words[1]} is not a translation Transformer")
        if setting.compiled:
            self.model.compile()  # in place: names of parameters stay
        self.trainer: Optional[Trainer] = None
        self.attention: Any = None

    def sentences(self, number: int, seed: int = 1) -> Dict[str, Any]:
        """A batch of `number` sentence pairs, as fairseq collates it."""
        generator = torch.Generator().manual_seed(seed)
        mean, pad, eos = self.setting.length, self.dictionary.pad(), self.dictionary.eos()
        least, most = max(1, mean - 2), mean + 2
        lengths = torch.randint(least, most + 1, (number,), generator=generator)
        lengths[0] = most
        shape = (number, most)
        words = torch.randint(
            self.dictionary.nspecial, len(self.dictionary), (2, *shape), generator=generator
        )
        place = torch.arange(most).expand(shape)  # [number, most]
        ends = place == lengths.unsqueeze(1) - 1
        beyond = place >= lengths.unsqueeze(1)
        target = words[0].masked_fill(ends, eos).masked_fill(beyond, pad)
        previous = torch.cat((torch.full((number, 1), eos), target[:, :-1]), dim=1)
        previous = previous.masked_fill(beyond, pad)
        # Sources are padded on the left.
        before = place < most - lengths.unsqueeze(1)
        source = words[1].masked_fill(before, pad)
        source[:, -1] = eos
        net_input = {
            "src_tokens": source,
            "src_lengths": lengths,
            "prev_output_tokens": previous,
        }
        return {
            "id": torch.arange(number),
            "nsentences": number,
            "ntokens": int(lengths.sum()),
            "net_input": net_input,
            "target": target,
        }

    # Each of these runs once and returns the seconds that it took.

    def train(self) -> Tuple[float, int]:
        """One update of fairseq's trainer; seconds and target tokens."""
        metrics.reset()  # of another model in this process
        batch, trainer = self._training_batch(), self._trainer()
        seconds = self._timed(lambda: trainer.train_step([copy.deepcopy(batch)]))
        return seconds, batch["ntokens"]

    def generate(self, batch_size: int) -> Tuple[float, int]:
        """Beam search over a batch; seconds and tokens of the best hypotheses."""
        length = self.setting.length
        model = self._decoder()
        generator = SequenceGenerator(
            [model],
            self.dictionary,
            beam_size=self.setting.beam,
            max_len_a=0,
            max_len_b=length,
            min_len=length,  # an untrained model ends where it likes
        )
        sample = _to(self.sentences(batch_size), self.device)
        with torch.no_grad(), self._autocast():
            seconds = self._timed(lambda: generator.generate([model], sample))
        return seconds, batch_size * length

    def module(self) -> Tuple[float, int]:
        """Forward and backward of one self-attention of the encoder; seconds and tokens."""
        setting = self.setting
        if self.attention is None:
            self.attention = self._attention()
        attention = self.attention
        width = attention.embed_dim
        generator = torch.Generator().manual_seed(1)
        shape = (setting.module_length, setting.module_batch, width)
        tokens = torch.randn(shape, generator=generator).to(self.device, self._dtype())
        gradient = torch.randn(shape, generator=generator).to(self.device, self._dtype())

        def step() -> None:
            source = tokens.detach().requires_grad_()
            with self._autocast():
                output, _ = attention(query=source, key=source, value=source, need_weights=False)
            output.backward(gradient.to(output.dtype))
            attention.zero_grad(set_to_none=True)

        return self._timed(step), setting.module_length * setting.module_batch

    def rate_of_products(self, side: int) -> float:
        """Floating-point operations a second in a product of square matrices, the best of five."""
        matrix = torch.randn(side, side, device=self.device, dtype=self._dtype())
        with self._autocast():
            seconds = min(self._timed(lambda: matrix @ matrix) for _ in range(5))
        return 2 * side**3 / seconds

    def rate_of_copies(self, size: int) -> float:
        """Bytes read and written a second where `size` bytes are copied, the best of five."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(1)
        target = torch.empty_like(source).fill_(2)
        return 2 * size / min(self._timed(lambda: target.copy_(source)) for _ in range(5))

    def _training_batch(self) -> Dict[str, Any]:
        return self.sentences(max(1, self.setting.tokens // self.setting.length))

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            criterion = self.task.build_criterion(self.cfg.criterion)
            self.trainer = Trainer(self.cfg, self.task, self.model, criterion)
            self.trainer.lr_step_update()
        return self.trainer

    def _decoder(self) -> nn.Module:
        """The model as fairseq-generate prepares it."""
        model = self.model.to(self.device, self._dtype())
        model.eval()
        model.prepare_for_inference_(self.cfg)
        return model

    def _attention(self) -> Any:
        for layer in self.model.encoder.layers:
            if isinstance(layer.self_attn, (MixtureOfAttentionHeads, MultiheadAttention)):
                attention = layer.self_attn.to(self.device, self._dtype()).train()
                return torch.compile(attention) if self.setting.compiled else attention
        raise UsageError("the encoder has no self-attention to measure")

    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.setting.precision == "bfloat16" else torch.float32

    def _autocast(self) -> ContextManager[Any]:
        if self.setting.precision != "amp":
            return nullcontext()
        kind = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        return torch.autocast(self.device.type, dtype=kind)

    def _timed(self, work: Callable[[], Any]) -> float:
        gc.collect()
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _config(words: List[str], setting: Setting) -> Any:
    moa = "moa" in words[1]
    parser = options.get_training_parser()
    given = [
        *("data", *words, "--source-lang", "en", "--target-lang", "de"),
        *("--share-all-embeddings", "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"),
        *("--lr", "1e-9", "--clip-norm", "0", "--label-smoothing", "0.1", "--dropout", "0.1"),
        "--criterion",
        "label_smoothed_cross_entropy" + ("_with_router_loss" if moa else ""),
        *([] if setting.device == "cuda" else ["--cpu"]),
        *(["--amp"] if setting.precision == "amp" else []),
    ]
    args = options.parse_args_and_arch(parser, input_args=given)
    cfg = convert_namespace_to_omegaconf(args)
    cfg.common.bf16 = setting.precision == "bfloat16"
    return cfg


def _to(sample: Any, device: torch.device) -> Any:
    if isinstance(sample, Tensor):
        return sample.to(device)
    if isinstance(sample, dict):
        return {name: _to(value, device) for name, value in sample.items()}
    return sample
