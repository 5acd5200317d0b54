"""Text into a model's pieces and back, by the tokenizer and subwords that fairseq is told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor


@dataclass(frozen=True)
class TextCodec:
    """As fairseq-interactive and fairseq-generate treat text.

    Attributes:
        tokenizer: of `task.build_tokenizer`, or None.
        bpe: of `task.build_bpe`, or None.
        post_process: value of `--post-process`: which subwords a dictionary joins by itself.
    """

    tokenizer: Optional[Any] = None
    bpe: Optional[Any] = None
    post_process: Optional[str] = None

    def encode(self, text: str) -> str:
        """Raw text to pieces with spaces between them."""
        for step in (self.tokenizer, self.bpe):
            text = text if step is None else step.encode(text)
        return text

    def decode(self, pieces: str) -> str:
        """Pieces with spaces between them to raw text."""
        for step in (self.bpe, self.tokenizer):
            pieces = pieces if step is None else step.decode(pieces)
        return pieces

    def text_of(self, dictionary: Any, tokens: Tensor, reference: bool = False) -> str:
        """Raw text of `[length]` indices.

        Args:
            dictionary: of fairseq.
            tokens: special symbols among them are left out.
            reference: an unknown word is written so that no hypothesis matches it.
        """
        pieces = dictionary.string(
            tokens.int().cpu(),
            self.post_process,
            escape_unk=reference,
            extra_symbols_to_ignore={dictionary.bos(), dictionary.eos(), dictionary.pad()},
        )
        return self.decode(pieces)
