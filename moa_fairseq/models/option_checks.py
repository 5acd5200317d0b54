"""Which of fairseq's own options a Transformer cannot be built or trained with."""

from __future__ import annotations

from typing import Any, Collection, Mapping, Optional

from ..errors import UsageError
from ..modules.moa_attention import CROSS, DECODER_SELF, ENCODER_SELF

PROBABILITIES = (
    *("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"),
    *("encoder_layerdrop", "decoder_layerdrop", "quant_noise_pq", "quant_noise_scalar"),
)
SIZES = (
    *("encoder_embed_dim", "encoder_ffn_embed_dim", "decoder_embed_dim", "decoder_ffn_embed_dim"),
    *("decoder_input_dim", "decoder_output_dim", "max_source_positions", "max_target_positions"),
    *("encoder_attention_heads", "decoder_attention_heads", "quant_noise_pq_block_size"),
)
COUNTS = ("encoder_layers", "decoder_layers")


def check_transformer_options(
    values: Mapping[str, Any], moa_modules: Collection[str] = (), moa_width: Optional[int] = None
) -> None:
    """Refuse fairseq's options where they are out of range or do not go together.

    fairseq takes many of them as they are: a dropout above 1 ends in a traceback in the first
    update, a negative number of layers is none.

    Args:
        values: fairseq's flat options by name, resolved.
        moa_modules: the attentions that are MoA; only the others need heads that divide d.
        moa_width: H·D, the inputs of MoA's output projections; None without MoA.

    Raises:
        UsageError: naming flag, value and remedy.
    """
    for name in PROBABILITIES:
        if not 0 <= values.get(name, 0) <= 1:
            raise UsageError(f"{flag(name)} {values[name]}: it must lie between 0 and 1")
    for names, least in ((SIZES, 1), (COUNTS, 0)):
        for name in names:
            if not values.get(name, least) >= least:
                raise UsageError(f"{flag(name)} {values[name]}: it must be at least {least}")
    for side, kinds in (("encoder", {ENCODER_SELF}), ("decoder", {DECODER_SELF, CROSS})):
        heads, dim = values[f"{side}_attention_heads"], values[f"{side}_embed_dim"]
        if not kinds <= set(moa_modules) and dim % heads != 0:
            raise UsageError(
                f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {dim}, as "
                "fairseq's own attention needs it; choose a divisor"
            )
    if values["share_all_embeddings"]:
        dims = [values[f"{side}_embed_dim"] for side in ("encoder", "decoder")]
        if dims[0] != dims[1]:
            raise UsageError(
                f"--share-all-embeddings needs one size, but --encoder-embed-dim is {dims[0]} and "
                f"--decoder-embed-dim {dims[1]}; make them equal, or leave it out"
            )
    shared = values["share_all_embeddings"] or values["share_decoder_input_output_embed"]
    dim, output = values["decoder_embed_dim"], values["decoder_output_dim"]
    if shared and dim != output and not values["adaptive_softmax_cutoff"]:
        raise UsageError(
            f"--decoder-output-dim {output}: shared embeddings are also the output projection, and "
            f"so need --decoder-embed-dim {dim}; give that, or share no embeddings"
        )
    if moa_width is not None and values["quant_noise_pq"] > 0 and values["checkpoint_activations"]:
        # fairseq's noise changes the weights themselves, so that a layer that runs twice differs.
        raise UsageError(
            "--checkpoint-activations and --quant-noise-pq: layers that are computed again would "
            "get other noise and other experts; leave out the one or the other"
        )
    check_blocks(values, moa_width)


def check_blocks(values: Mapping[str, Any], moa_width: Optional[int]) -> None:
    """Refuse blocks of quantization noise that do not divide the inputs of a projection."""
    size = values["quant_noise_pq_block_size"]
    names = [
        f"{side}_{what}_dim" for side in ("encoder", "decoder") for what in ("embed", "ffn_embed")
    ]
    inputs = {f"{flag(name)} {values[name]}": values[name] for name in names}
    if moa_width is not None:
        inputs[f"--heads-per-expert times --head-dim, {moa_width}"] = moa_width
    for name, number in inputs.items():
        if values["quant_noise_pq"] > 0 and number % size != 0:
            raise UsageError(
                f"--quant-noise-pq-block-size {size} does not divide {name}; choose a divisor"
            )


def flag(name: str) -> str:
    """The option's name on the command line."""
    return "--" + name.replace("_", "-")
