"""MoA attention by the book: one token, one expert and one head at a time."""

from __future__ import annotations

import math

import torch


def slow_attention(module, query, key, routing, query_padding, key_padding, mask):
    """What the module must give for the routing that it chose.

    Args:
        module: a `MixtureOfAttentionHeads`.
        query: `[T, batch, d]`.
        key: `[S, batch, key_dim]`, also the values.
        routing: of `[batch, T]` tokens.
        query_padding: `[batch, T]` bool; key_padding: `[batch, S]` bool.
        mask: `[T, S]` bool, true where a key is hidden.

    Returns:
        `[T, batch, d]`, and the weights of the heads `[K·H, batch, T, S]`, in float64.
    """
    length, batch, dim = query.shape
    heads, size = module.heads_per_expert, module.head_dim
    query, key = query.double(), key.double()
    output = torch.zeros(length, batch, dim, dtype=torch.float64)
    weights = torch.zeros(module.num_selected * heads, batch, length, len(key), dtype=torch.float64)
    for b in range(batch):
        keys = linear(key[:, b], module.k_proj)
        values = linear(key[:, b], module.v_proj)
        for t in range(length):
            if query_padding[b, t]:
                continue
            visible = [s for s in range(len(key)) if not (key_padding[b, s] or mask[t, s])]
            for rank, expert in enumerate(routing.indices[b, t].tolist()):
                queries = query[t, b] @ module.q_experts.weight[expert].double()
                if module.q_experts.bias is not None:
                    queries = queries + module.q_experts.bias[expert].double()
                result = torch.zeros(heads * size, dtype=torch.float64)
                for head in range(heads):
                    part = slice(head * size, (head + 1) * size)
                    scores = [float(queries[part] @ keys[s, part]) for s in visible]
                    scores = [score / math.sqrt(size) for score in scores]
                    largest = max(scores, default=0.0)
                    exponents = [math.exp(score - largest) for score in scores]
                    for s, exponent in zip(visible, exponents):
                        weight = exponent / sum(exponents)
                        weights[rank * heads + head, b, t, s] = weight
                        result[part] += weight * values[s, part]
                projected = result @ module.o_experts.weight[expert].double()
                if module.o_experts.bias is not None:
                    projected = projected + module.o_experts.bias[expert].double()
                output[t, b] += float(routing.gates[b, t, rank]) * module.output_scale * projected
    return output, weights


def linear(rows, layer):
    result = rows @ layer.weight.double().T
    return result if layer.bias is None else result + layer.bias.double()


def slow_gates(probabilities, indices, normalization):
    """The gates of one token, from equation 4."""
    selected = [float(probabilities[expert]) for expert in indices]
    return selected if normalization == "none" else [p / sum(selected) for p in selected]
