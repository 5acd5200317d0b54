"""Mixture of Attention Heads: multi-head attention whose heads are experts.

A drop-in for fairseq's `MultiheadAttention`: same call, same cache protocol, same return value.
Equations are numbered as in the paper (arXiv 2210.05144, section 3).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from .absorbed_projections import AbsorbedProjections, absorb, attend_absorbed, worth_absorbing
from .attention_products import attend, attend_fused, merge_masks, worth_fusing
from .expert_linear import ExpertLinear
from .expert_products import AUTO, DENSE, choose_backend, dispatch
from .routing import Router
from .shared_keys import count_sharers, is_identity

ENCODER_SELF = "encoder-self"
DECODER_SELF = "decoder-self"
CROSS = "cross"
ATTENTION_KINDS = (ENCODER_SELF, DECODER_SELF, CROSS)

# Their names in the cache.
ABSORBED = tuple(f"absorbed_{name}" for name in AbsorbedProjections._fields)

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]


@with_incremental_state
class MixtureOfAttentionHeads(nn.Module):
    """Attention with E experts of H heads, of which a router picks K for every query token.

    Every expert has its own query and output projection. Keys and values are projected once
    and shared by all experts (H = 1), or once for each of the H heads that every expert has.
    The output projection W_i^o of an expert is `output_scale` times `o_experts.weight[i]`.

    Args:
        embed_dim: d, size of queries and of the output.
        num_selected: K.
        num_experts: E.
        head_dim: D, size of one head.
        heads_per_expert: H.
        key_dim: size of keys and values; None means `embed_dim`.
        kind: which attention of the Transformer this is, one of `ATTENTION_KINDS`.
        dropout: probability of dropping an attention weight.
        bias: whether the four projections have biases.
        gate_normalization, router_noise, sample_topk, router_init_std: see :class:`Router`.
        output_init_gain: initial size of the output, relative to that of fairseq's attention.
        quant_noise_pq, quant_noise_block_size: fairseq's quantization noise.
        expert_backend: how products with experts are computed, one of
            :data:`~moa_fairseq.modules.expert_products.BACKENDS`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_selected: int,
        num_experts: int,
        head_dim: int,
        heads_per_expert: int = 1,
        key_dim: Optional[int] = None,
        kind: str = ENCODER_SELF,
        dropout: float = 0.0,
        bias: bool = False,
        gate_normalization: str = "detached",
        router_noise: bool = False,
        sample_topk: int = 0,
        router_init_std: float = 0.02,
        output_init_gain: float = 0.4,
        quant_noise_pq: float = 0.0,
        quant_noise_block_size: int = 8,
        expert_backend: str = AUTO,
    ) -> None:
        super().__init__()
        if kind not in ATTENTION_KINDS:
            raise ValueError(
                f"unknown attention kind {kind!r}; one of {', '.join(ATTENTION_KINDS)}"
            )
        self.embed_dim = embed_dim
        self.num_selected = num_selected
        self.num_experts = num_experts
        self.head_dim = head_dim
        self.heads_per_expert = heads_per_expert
        self.kind = kind
        self.expert_backend = expert_backend
        self.num_heads = num_selected * heads_per_expert  # heads that one token uses
        self.beam_size = 1
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)

        key_dim = embed_dim if key_dim is None else key_dim
        width = heads_per_expert * head_dim
        # Gates are about 1/K (1/E where they are plain probabilities), so output projections
        # must be that much larger than fairseq's. They are stored divided by it: Adam's steps
        # do not know the size of a weight, and would move a large one too slowly.
        self.output_scale = num_experts if gate_normalization == "none" else num_selected
        # Queries, keys and values start with the weights' variance of fairseq's attention,
        # 1/(2d). The output sums K·H·D products, where fairseq's sums d of variance 1/d.
        output_std = output_init_gain / (num_selected * width) ** 0.5
        experts = functools.partial(
            ExpertLinear,
            num_experts,
            bias=bias,
            quant_noise=quant_noise_pq,
            quant_noise_block_size=quant_noise_block_size,
        )
        self.router = Router(
            embed_dim,
            num_experts,
            num_selected,
            gate_normalization,
            router_noise,
            sample_topk,
            router_init_std,
        )
        self.q_experts = experts(embed_dim, width, init_std=(2 * embed_dim) ** -0.5)
        self.o_experts = experts(width, embed_dim, init_std=output_std)
        self.k_proj = quant_noise(
            nn.Linear(key_dim, width, bias=bias), quant_noise_pq, quant_noise_block_size
        )
        self.v_proj = quant_noise(
            nn.Linear(key_dim, width, bias=bias), quant_noise_pq, quant_noise_block_size
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        self.q_experts.reset_parameters()
        self.o_experts.reset_parameters()
        for projection in (self.k_proj, self.v_proj):
            nn.init.normal_(projection.weight, std=(2 * projection.in_features) ** -0.5)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[IncrementalState] = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Optional[Tensor] = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        query_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `[T, batch, d]`.
            key, value: `[S, batch, key_dim]`. In cross-attention they are ignored once they
                are in the cache (`static_kv`), and may then be None.
            key_padding_mask: `[batch, S]`, true where a key is padding.
            incremental_state: fairseq's cache; None outside step-by-step decoding.
            need_weights: return the attention weights, averaged over heads.
            static_kv: keys and values do not change between steps (cross-attention).
            attn_mask: `[T, S]`, added to the scores (minus infinity hides a key).
            before_softmax: not supported.
            need_head_weights: return the weights of every head; implies `need_weights`.
            query_padding_mask: `[batch, T]`, true where a query is padding; its output is
                zero. In self-attention it follows from `key_padding_mask`.

        Returns:
            output `[T, batch, d]`, and attention weights: None, `[batch, T, S]`, or with
            `need_head_weights` `[K·H, batch, T, S]`, heads in the order of the routing.

        Raises:
            NotImplementedError: for `before_softmax`.
        """
        if before_softmax:
            raise NotImplementedError("before_softmax is not available in MoA attention")
        target_length, batch, _ = query.shape
        if query_padding_mask is None and self.kind != CROSS and key_padding_mask is not None:
            # The queries are the last keys (with --cross-self-attention, not the only ones).
            query_padding_mask = key_padding_mask[:, -target_length:]
        if query_padding_mask is not None:
            query_padding_mask = query_padding_mask.bool()

        tokens = query.transpose(0, 1)  # [batch, T, d]
        routing = self.router(tokens)
        self.router.record(routing)
        gates = routing.gates
        if query_padding_mask is not None:
            gates = gates.masked_fill(query_padding_mask.unsqueeze(-1), 0.0)
        gates = gates * self.output_scale
        keys, values, key_padding_mask = self._keys_and_values(
            key, value, key_padding_mask, incremental_state, static_kv
        )
        absorbed = self._absorbed(incremental_state)
        if absorbed is None:
            mask = merge_masks(attn_mask, key_padding_mask, self.num_selected, len(keys))
            output, weights = self._attend_routed(
                *(tokens, routing.indices, gates, query_padding_mask),
                *(keys, values, mask, need_weights or need_head_weights),
            )
        else:
            output, weights = self._attend_absorbed(
                *(tokens, routing.indices, gates, absorbed, key_padding_mask),
                need_weights or need_head_weights,
            )
        output = output.reshape(batch, target_length, -1).transpose(0, 1)  # [T, batch, d]
        if weights is None:
            return output, None
        weights = weights.reshape(batch, target_length, self.num_heads, -1)  # [batch, T, K*H, S]
        if need_head_weights:
            return output, weights.permute(2, 0, 1, 3)  # [K*H, batch, T, S]
        return output, weights.mean(dim=2)  # [batch, T, S]

    def _attend_absorbed(
        self,
        tokens: Tensor,
        indices: Tensor,
        gates: Tensor,
        absorbed: AbsorbedProjections,
        key_padding_mask: Optional[Tensor],
        need_weights: bool,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """As :meth:`_attend_routed`, with keys and values that have absorbed the projections."""
        # Tokens of the hypotheses of a sentence stand side by side.
        rows = (absorbed.keys.shape[0], -1)
        all_gates = gates.new_zeros(*gates.shape[:2], self.num_experts)  # [batch, T, E]
        all_gates = all_gates.scatter(2, indices, gates)
        output, weights = attend_absorbed(
            tokens.reshape(*rows, self.embed_dim),  # [n, beam*T, d]
            all_gates.reshape(*rows, self.num_experts),  # [n, beam*T, E]
            absorbed,
            key_padding_mask,
            self.o_experts.bias,
        )
        if not need_weights:
            return output, None
        weights = weights.reshape(*all_gates.shape, -1)  # [batch, T, E, S]
        chosen = indices.unsqueeze(3).expand(-1, -1, -1, weights.shape[3])
        return output, weights.gather(2, chosen)  # [batch, T, K, S]

    def _attend_routed(
        self,
        tokens: Tensor,
        indices: Tensor,
        gates: Tensor,
        query_padding_mask: Optional[Tensor],
        keys: Tensor,
        values: Tensor,
        mask: Optional[Tensor],
        need_weights: bool,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Σ_i w_{i,t}·o_{i,t}·W_i^o for the experts that each token selected (equation 3).

        Args:
            tokens: `[batch, T, d]`.
            indices, gates: `[batch, T, K]`.
            query_padding_mask: `[batch, T]` bool.
            keys, values: `[n, H, S, D]`; one row for the hypotheses that share it.
            mask: of :func:`merge_masks`.
            need_weights: return attention weights.

        Returns:
            output `[batch*T, d]` and attention weights `[batch, T, K·H, S]` or None.
        """
        batch, target_length, _ = tokens.shape
        widths = [self.embed_dim, self.heads_per_expert * self.head_dim]
        backend = choose_backend(
            self.expert_backend, self.num_selected, self.num_experts, tokens, widths
        )
        plan = dispatch(
            indices.flatten(0, 1),  # [batch*T, K]
            self.num_experts,
            None if query_padding_mask is None else query_padding_mask.flatten(),  # [batch*T]
            backend,
        )
        queries = self.q_experts.project_tokens(tokens.reshape(-1, self.embed_dim), plan)
        queries = queries.view(batch, target_length, self.num_selected, -1)  # [batch, T, K, H*D]
        dropout = self.dropout_module.p if self._drops_weights() else 0.0
        if not need_weights and worth_fusing(keys, dropout):
            early, weights = False, None
            heads = attend_fused(queries, keys, values, mask, dropout)
        else:
            # Gates go where there is less to multiply: to weights of S keys, or to D features.
            early = keys.shape[2] < self.head_dim
            heads, weights = attend(
                queries, keys, values, mask, self.dropout_module, gates if early else None
            )
        output = self.o_experts.combine_heads(
            heads.flatten(0, 1),  # [batch*T, K, H*D]
            gates.flatten(0, 1),  # [batch*T, K]
            plan,
            gated=early,
        )
        return output, weights if need_weights else None

    def _keys_and_values(
        self,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        incremental_state: Optional[IncrementalState],
        static_kv: bool,
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Project keys and values, through the cache where there is one.

        Returns keys and values `[batch, H, S, D]` and their padding mask `[batch, S]`. Values of
        padding are zero, so that a query that sees nothing else gets zero. Where hypotheses of a
        sentence share its keys, they have one row together.
        """
        saved = self._get_input_buffer(incremental_state)
        if static_kv and "prev_key" in saved:
            keys, values = saved["prev_key"], saved["prev_value"]
            assert keys is not None and values is not None
            return keys, values, saved.get("prev_key_padding_mask")

        if key is None or value is None:
            raise ValueError("key and value are needed until they are in the cache")
        sharers = 1
        if static_kv and incremental_state is not None:
            sharers = count_sharers(key, self.beam_size)
        if sharers > 1:
            key, value = key[:, ::sharers], value[:, ::sharers]
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask[::sharers]
        keys = self._split_heads(self.k_proj(key))
        values = self._split_heads(self.v_proj(value))
        if incremental_state is not None:
            previous_keys, previous_values = saved.get("prev_key"), saved.get("prev_value")
            if previous_keys is not None and previous_values is not None:
                keys = torch.cat((previous_keys, keys), dim=2)
                values = torch.cat((previous_values, values), dim=2)
            key_padding_mask = MultiheadAttention._append_prev_key_padding_mask(
                key_padding_mask=key_padding_mask,
                prev_key_padding_mask=saved.get("prev_key_padding_mask"),
                batch_size=keys.size(0),
                src_len=keys.size(2),
                static_kv=static_kv,
            )
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.bool()
            values = values.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        if incremental_state is not None:
            buffer = {
                "prev_key": keys,
                "prev_value": values,
                "prev_key_padding_mask": key_padding_mask,
            }
            if sharers > 1:
                buffer["sharers"] = torch.tensor(sharers)
                if self._may_absorb(keys, sharers):
                    absorbed = absorb(
                        *(keys, values, self.q_experts.weight, self.o_experts.weight),
                        self.q_experts.bias,
                    )
                    buffer.update(zip(ABSORBED, absorbed))
            self._set_input_buffer(incremental_state, buffer)
        return keys, values, key_padding_mask

    def _drops_weights(self) -> bool:
        dropout = self.dropout_module
        return dropout.p > 0 and (self.training or dropout.apply_during_inference)

    def _may_absorb(self, keys: Tensor, sharers: int) -> bool:
        """Whether these keys `[n, H, S, D]`, settled and shared, go into the projections."""
        possible = (
            self.heads_per_expert == 1
            and self.expert_backend in (AUTO, DENSE)
            and keys.device.type == "cpu"
            and keys.dtype == torch.float32
            and not self._drops_weights()
        )
        sizes = (self.num_selected, self.num_experts, self.embed_dim)
        return possible and worth_absorbing(sharers, keys, *sizes)

    def _absorbed(
        self, incremental_state: Optional[IncrementalState]
    ) -> Optional[AbsorbedProjections]:
        saved = self._get_input_buffer(incremental_state)
        if ABSORBED[0] not in saved:
            return None
        return AbsorbedProjections(*(saved[name] for name in ABSORBED))  # type: ignore[arg-type]

    def _split_heads(self, projected: Tensor) -> Tensor:
        length, batch, _ = projected.shape
        heads = projected.view(length, batch, self.heads_per_expert, self.head_dim)
        return heads.permute(1, 2, 0, 3)  # [S, batch, H, D] -> [batch, H, S, D]

    # fairseq's cache protocol. The decorator adds these two methods.
    get_incremental_state: Callable[..., Any]
    set_incremental_state: Callable[..., Any]

    def reorder_incremental_state(
        self, incremental_state: Optional[IncrementalState], new_order: Tensor
    ) -> Optional[IncrementalState]:
        """Keep the hypotheses `new_order` `[new batch]` of the cache (beam search)."""
        buffer = self._get_input_buffer(incremental_state)
        if not buffer or incremental_state is None:
            return incremental_state
        present = [tensor for tensor in buffer.values() if tensor is not None]
        sharers = buffer.get("sharers")
        if sharers is not None:
            # Hypotheses move within their sentence; what they share moves when sentences end.
            new_order = new_order.view(-1, int(sharers))[:, 0] // int(sharers)  # [sentences]
        if is_identity(new_order, len(present[0])):
            return incremental_state
        reordered = {
            name: tensor
            if tensor is None or tensor.dim() == 0
            else tensor.index_select(0, new_order)
            for name, tensor in buffer.items()
        }
        return self._set_input_buffer(incremental_state, reordered)

    def set_beam_size(self, beam_size: int) -> None:
        """Of fairseq's beam search: neighbours in a batch may be hypotheses of one sentence."""
        self.beam_size = beam_size

    def _get_input_buffer(
        self, incremental_state: Optional[IncrementalState]
    ) -> Dict[str, Optional[Tensor]]:
        state = self.get_incremental_state(incremental_state, "attn_state")
        return {} if state is None else state

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: Dict[str, Optional[Tensor]]
    ) -> IncrementalState:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)
