"""What a head report counts, on a model whose routing is known and computed by hand."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from moa_fairseq.analysis.heads import statistics
from moa_fairseq.analysis.heads.context import ModelContext, ReportOptions
from moa_fairseq.analysis.heads.counts import RatioSums, RouterTotals, gate_shares
from moa_fairseq.analysis.heads.pipeline import make_sections
from moa_fairseq.analysis.heads.streams import StreamBatch, frequency_labels, position_labels
from moa_fairseq.analysis.heads.survey import random_router, survey
from moa_fairseq.analysis.heads.surveyed import Surveyed, preferences
from moa_fairseq.analysis.heads.words import NO_ROW, WordsOfTokens
from moa_fairseq.modules.recording import routed_modules
from moa_fairseq.modules.routing import (
    GATE_NORMALIZATIONS,
    Router,
    Routing,
    compute_gates,
    select_experts,
)

from ..toy import toy_model, toy_sample, toy_task

# Which two of four experts a word uses, the likelier first.
EXPERTS = {"w0": (0, 1), "w1": (2, 0), "w2": (1, 2), "w3": (3, 2), "</s>": (0, 3)}
SOURCES = (["w0", "w1", "w0", "w2"], ["w1", "w3"])
ENCODER = "encoder.layers.0.self_attn"
# softmax of (2, 1, 0, 0): what every token's router says of its first, second and other experts.
PROBABILITIES = [math.exp(score) / (math.e**2 + math.e + 2) for score in (2, 1, 0, 0)]


def known_model(task):
    """Two encoder layers and a decoder that pass on the words they read, and route by EXPERTS.

    Layer 1 calls expert i of layer 0 by the name 3 − i.
    """
    model = toy_model(
        task,
        **{"encoder_layers": 2, "decoder_layers": 1, "no_token_positional_embeddings": True},
        **{"encoder_normalize_before": True, "decoder_normalize_before": True},
        router_init_std=0.02,
    )
    width = 16
    with torch.no_grad():
        embedding = model.encoder.embed_tokens.weight.zero_()
        for place, word in enumerate(EXPERTS):
            embedding[task.source_dictionary.index(word), place] = 100.0
        for name, parameter in model.named_parameters():
            if "o_experts" in name or ".fc2." in name:
                parameter.zero_()  # a layer's output is its input
        # Layer norm makes √15 of the one number and −1/√15 of the others.
        scale = math.sqrt(width - 1) + 1 / math.sqrt(width - 1)
        for name, _, module in routed_modules(model):
            scores = torch.zeros(width, 4)
            for place, (first, second) in enumerate(EXPERTS.values()):
                scores[place, first], scores[place, second] = 2.0, 1.0
            scores[-1] = -scores.sum(0)  # so that the others add nothing
            if name == "encoder.layers.1.self_attn":
                scores = scores.flip(1)
            module.router.weight.copy_(scores / scale)
    return model.eval()


def sample_of(task, sentences):
    """A batch of these source sentences, each its own translation."""
    dictionary = task.source_dictionary
    rows = [[dictionary.index(word) for word in [*words, "</s>"]] for words in sentences]
    longest = max(map(len, rows))
    pad = dictionary.pad()
    source = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    previous = torch.tensor([[row[-1], *row[:-1]] + [pad] * (longest - len(row)) for row in rows])
    lengths = torch.tensor(list(map(len, rows)))
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
    return {"net_input": net_input}


def context_of(task, model, samples, **options):
    options = ReportOptions(**{"min_count": 1, "cpu": True, **options})
    return ModelContext(
        *("toy", Path("toy.pt"), model, task, torch.device("cpu"), options), lambda: iter(samples)
    )


@pytest.fixture(scope="module")
def known():
    task = toy_task()
    for word, count in (("w0", 5000), ("w1", 5000), ("w2", 40), ("w3", 1)):
        task.source_dictionary.count[task.source_dictionary.index(word)] = count
    context = context_of(task, known_model(task), [sample_of(task, SOURCES)])
    return Surveyed(context, survey(context))


def close(values, expected, tolerance=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(values, dtype=torch.float64).nan_to_num(neginf=-99),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


def test_load_gate_mass_and_entropy(known):
    totals = known.survey.trained[ENCODER]
    # w0 and w1 twice, w2 and w3 once, </s> twice.
    assert totals.selected.y.tolist() == [6, 3, 4, 3]
    assert totals.selected.n == 8
    share = statistics.ratio(totals.selected)
    close(share.value, [0.75, 0.375, 0.5, 0.375])
    # Sentences use expert 0 four times in five tokens and twice in three: residuals ±1/4, so the
    # variance is 2/1·(1/16 + 1/16)/8².
    close(share.half_width[0], 1.959964 * math.sqrt(0.25) / 8)
    close(statistics.coefficient_of_variation(totals.selected.y), math.sqrt(1.5) / 4)
    first = PROBABILITIES[0] / (PROBABILITIES[0] + PROBABILITIES[1])
    # Expert 0 is first for w0 and </s>, second for w1.
    close(totals.gates.y[0], 4 * first + 2 * (1 - first))
    close(totals.gates.y.sum(), 8)
    entropy = -sum(p * math.log(p) for p in PROBABILITIES)
    close(statistics.ratio(totals.entropy).value[0], entropy)
    close(statistics.ratio(totals.entropy).half_width[0], 0)


def test_preferences_of_words_and_pieces(known):
    totals = known.survey.trained[ENCODER]
    words = known.row_names(ENCODER, "word")
    assert words == ["w0", "w1", "w2", "</s>", "w3"]
    assert known.row_counts(ENCODER, "word").tolist() == [2, 2, 1, 2, 1]
    # Half of a word's mass goes to each of its experts, of all mass 6, 3, 4 and 3 of 16.
    half = {0: math.log2(8 / 6), 1: math.log2(8 / 3), 2: 1.0, 3: math.log2(8 / 3)}
    values = preferences(known, ENCODER, "word", totals)
    pieces = preferences(known, ENCODER, "piece", totals)
    for row, word in enumerate(words):
        expected = [half[i] if i in EXPERTS[word] else -99 for i in range(4)]
        close(values[row], expected)
        close(pieces[known.context.task.source_dictionary.index(word)], expected)
    assert pieces[known.context.task.source_dictionary.index("w9")].isnan().all()
    # The word decides the choice: all of its H(6, 3, 4, 3 of 16) − 1 bits.
    bits = -sum(n / 16 * math.log2(n / 16) for n in (6, 3, 4, 3)) - 1
    close(statistics.information(totals.pieces), bits)
    close(statistics.choice_information(totals), bits)


def test_a_least_count_leaves_rare_words_out(known):
    rare = Surveyed(
        context_of(known.context.task, known.context.model, [], min_count=2), known.survey
    )
    values = preferences(rare, ENCODER, "word", rare.survey.trained[ENCODER])
    assert values.isnan().all(1).tolist() == [False, False, True, False, True]


def test_experts_that_go_together(known):
    totals = known.survey.trained[ENCODER]
    pairs = totals.pairs
    assert pairs.diagonal().tolist() == [6, 3, 4, 3]
    expected = {(0, 1): 2, (0, 2): 2, (0, 3): 2, (1, 2): 1, (2, 3): 1, (1, 3): 0}
    for (first, second), count in expected.items():
        assert pairs[first, second] == pairs[second, first] == count


def test_positions_and_frequencies(known):
    totals = known.survey.trained[ENCODER]
    labels = position_labels()
    rows = {label: totals.positions[row].tolist() for row, label in enumerate(labels)}
    assert rows["1"] == [2, 1, 1, 0]  # w0, w1
    assert rows["2"] == [1, 0, 2, 1]  # w1, w3
    assert rows["3"] == [1, 1, 0, 0]  # w0
    assert rows["4"] == [0, 1, 1, 0]  # w2
    assert rows["end"] == [2, 0, 0, 2]
    assert known.row_counts(ENCODER, "position").sum() == 8
    bins = {label: totals.frequencies[row].tolist() for row, label in enumerate(frequency_labels())}
    assert bins["special"] == [2, 0, 0, 2]
    assert bins["3,162–9,999"] == [4, 2, 2, 0]  # w0 and w1
    assert bins["32–99"] == [0, 1, 1, 0]
    assert bins["1–2"] == [0, 0, 1, 1]


def test_the_decoder_routes_its_input(known):
    """That is the target after the sign that starts it, which stands first."""
    labels = position_labels()
    for name in ("decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"):
        totals = known.survey.trained[name]
        assert totals.positions[labels.index("1")].tolist() == [2, 0, 0, 2]  # </s> twice
        assert totals.positions[labels.index("end")].sum() == 0
        assert totals.selected.y.tolist() == [6, 3, 4, 3]


def test_layers_that_choose_alike_agree_whatever_experts_are_called(known):
    first, second = ENCODER, "encoder.layers.1.self_attn"
    routers, joint = known.survey.trained, known.survey.joint[first, second]
    assert routers[second].selected.y.tolist() == [3, 4, 3, 6]
    close(statistics.agreement(joint, routers[first].pairs, routers[second].pairs), 1)
    # An expert of each layer, drawn from a token's two: by a slow and obvious sum.
    draws = Counter()
    for word in [*SOURCES[0], *SOURCES[1], "</s>", "</s>"]:
        for one in EXPERTS[word]:
            for other in EXPERTS[word]:
                draws[one, 3 - other] += 1 / 32
    rows, columns = Counter(), Counter()
    for (one, other), p in draws.items():
        rows[one] += p
        columns[other] += p
    bits = sum(p * math.log2(p / rows[a] / columns[b]) for (a, b), p in draws.items())
    close(statistics.information(joint), bits)


def test_random_routers_see_the_same_tokens_and_change_nothing(known):
    again = survey(known.context)
    other = survey(
        context_of(known.context.task, known.context.model, known.context.batches(), seed=2)
    )
    for name, totals in known.survey.random.items():
        assert totals.selected.n == 8 and totals.selected.y.sum() == 16
        assert torch.equal(again.random[name].pieces, totals.pieces)
        assert torch.equal(other.trained[name].pieces, known.survey.trained[name].pieces)
    assert any(
        not torch.equal(other.random[name].pieces, totals.pieces)
        for name, totals in known.survey.random.items()
    )


def samples(task, sizes):
    """The same sentences in batches of these sizes."""
    whole = toy_sample(task, [3, 9, 1, 6, 4, 12], [5, 2, 8, 1, 7, 3], seed=3)["net_input"]
    found, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        found.append({"net_input": {name: value[rows] for name, value in whole.items()}})
    return found


@pytest.mark.parametrize("experts", [4, 2])  # with K = 2: selection, and none
def test_streaming_is_all_at_once(experts):
    task = toy_task()
    model = toy_model(task, num_experts=experts).eval()
    once = survey(context_of(task, model, samples(task, [6])))
    for sizes in ([1] * 6, [4, 2]):
        streamed = survey(context_of(task, model, samples(task, sizes)))
        assert streamed.words == once.words
        for routers in ("trained", "random"):
            for name, totals in getattr(once, routers).items():
                other = getattr(streamed, routers)[name]
                assert torch.equal(other.selected.y, totals.selected.y)
                for sums in ("selected", "gates", "entropy"):
                    for part in ("y", "yy", "yn"):
                        close(
                            getattr(getattr(other, sums), part),
                            getattr(getattr(totals, sums), part),
                        )
                    assert getattr(other, sums).nn == getattr(totals, sums).nn
                for table in ("pairs", "pieces", "positions", "frequencies"):
                    close(getattr(other, table), getattr(totals, table))
                rows = len(once.words["source" if name.startswith("enc") else "target"])
                close(other.words[:rows], totals.words[:rows])
        for pair, joint in once.joint.items():
            close(streamed.joint[pair], joint)


def test_gates_stand_for_selection_where_nothing_is_selected():
    task = toy_task()
    model = toy_model(task, num_experts=2).eval()
    totals = survey(context_of(task, model, samples(task, [6]))).trained[ENCODER]
    assert totals.selected.y.tolist() == [totals.selected.n] * 2
    close(totals.pieces.sum(), totals.selected.n)
    close(totals.pieces.sum(0), totals.gates.y)
    assert totals.gates.y[0] != totals.gates.y[1]


def clustered(generator, sentences=60):
    """Sentences whose tokens use an expert more or less often together, 0.3 on the whole."""
    lengths = torch.randint(2, 40, (sentences,), generator=generator)
    often = torch.rand(sentences, generator=generator) < 0.5
    chance = torch.where(often, 0.55, 0.05)
    used = [
        (torch.rand(int(length), generator=generator) < p).double()
        for length, p in zip(lengths, chance)
    ]
    return lengths.double(), torch.stack([tokens.sum() for tokens in used])


def ratio_sums(lengths, used):
    return RatioSums(
        *(used.sum()[None], used.square().sum()[None], (used * lengths).sum()[None]),
        *(float(lengths.sum()), float(lengths.square().sum()), len(lengths)),
    )


def test_intervals_hold_although_tokens_of_a_sentence_belong_together():
    generator = torch.Generator().manual_seed(5)
    covered = naive = 0
    for _ in range(400):
        lengths, used = clustered(generator)
        value, half_width = statistics.ratio(ratio_sums(lengths, used))
        covered += abs(float(value) - 0.3) <= float(half_width)
        as_if_independent = 1.96 * math.sqrt(0.3 * 0.7 / float(lengths.sum()))
        naive += abs(float(value) - 0.3) <= as_if_independent
    assert 0.91 <= covered / 400 <= 0.98
    assert naive / 400 < 0.6


def test_intervals_are_those_of_the_bootstrap_over_sentences():
    generator = torch.Generator().manual_seed(6)
    lengths, used = clustered(generator, 200)
    draws = torch.randint(200, (4000, 200), generator=generator)
    ratios = used[draws].sum(1) / lengths[draws].sum(1)
    half_width = float(statistics.ratio(ratio_sums(lengths, used)).half_width)
    assert half_width == pytest.approx(1.96 * float(ratios.std()), rel=0.05)


def test_one_sentence_has_no_interval():
    sums = ratio_sums(torch.tensor([4.0]), torch.tensor([1.0]))
    assert statistics.ratio(sums).value.tolist() == [0.25]
    assert statistics.ratio(sums).half_width.isnan().all()


class EncoderOnly(torch.nn.Module):
    """The encoder of a model, called as a masked language model is."""

    def __init__(self, model):
        super().__init__()
        self.encoder = model.encoder

    def forward(self, src_tokens, src_lengths):
        return self.encoder(src_tokens, src_lengths=src_lengths)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(
    "options",
    [
        {"encoder_layers": 1, "encoder_attention_heads": 1},  # no pairs, nothing to agree with
        {"ffn_type": "moe", "moa_modules": "cross"},
    ],
)
def test_sections_of_models_with_few_modules(options):
    task = toy_task()
    whole = toy_model(task, **options).eval()
    model = EncoderOnly(whole) if "moa_modules" not in options else whole
    batches = samples(task, [6])
    for batch in batches:
        if model is not whole:
            del batch["net_input"]["prev_output_tokens"]
    context = context_of(task, model, batches)
    sections = make_sections([Surveyed(context, survey(context))])
    json.dumps([section.numbers for section in sections], allow_nan=False)
    numbers = {section.name: section.numbers for section in sections}["load"]["modules"]["toy"]
    kinds = {module["kind"] for module in numbers.values()}
    if model is whole:
        assert kinds == {"cross", "encoder-ffn", "decoder-ffn"}
    else:
        assert kinds == {"encoder-self"}
    tokens = int(batches[0]["net_input"]["src_lengths"].sum())
    assert {module["tokens"] for module in numbers.values() if "encoder" in module["kind"]} == {
        tokens
    }


def batch_of(rows):
    """Three tokens of one sentence: a word of two pieces, and one of one piece."""
    zeros = torch.zeros(3, dtype=torch.long)
    words = WordsOfTokens(torch.tensor([0, 0, 1]), torch.tensor(rows))
    return StreamBatch(torch.ones(1, 3, dtype=torch.bool), zeros, zeros, zeros, zeros, words, 1)


def routing_of(scores, selected, normalization="detached"):
    probabilities = torch.softmax(scores, -1)
    indices = select_experts(probabilities, selected)
    gates = compute_gates(scores, probabilities, indices, normalization)
    return Routing(scores, probabilities, indices, gates)


def test_a_word_of_several_pieces_counts_once():
    scores = torch.tensor([[3.0, 2, 1, 0], [3, 0, 2, 1], [0, 1, 2, 3]])
    totals = RouterTotals(4, 2, 1)
    totals.add(routing_of(scores, 2), batch_of([1, 0]))
    assert totals.words[:2].tolist() == [[0, 0, 1, 1], [1, 0.5, 0.5, 0]]
    totals.add(routing_of(scores, 2), batch_of([NO_ROW, 0]))
    assert totals.words[:2].tolist() == [[0, 0, 2, 2], [1, 0.5, 0.5, 0]]


@pytest.mark.parametrize("normalization", GATE_NORMALIZATIONS)
def test_gate_shares_of_a_token_sum_to_one(normalization):
    scores = torch.tensor([[3.0, 2, 1, 0], [3, 0, 2, 1], [0, 1, 2, 3]])
    shares = gate_shares(routing_of(scores, 2, normalization))
    first = math.e / (math.e + 1)
    close(shares, [[first, 1 - first, 0, 0], [first, 0, 1 - first, 0], [0, 0, 1 - first, first]])


def test_random_routers_are_as_uneven_as_the_trained_one():
    router = Router(512, 64, 8)
    with torch.no_grad():
        router.weight.mul_(30)
    other = random_router(router, 3)
    assert float(other.weight.std()) == pytest.approx(0.6, rel=0.02)
    both = torch.stack((router.weight.flatten(), other.weight.flatten()))
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05
    assert torch.equal(other.weight, random_router(router, 3).weight)
    assert not torch.equal(other.weight, random_router(router, 4).weight)
