from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data.indexed_dataset import make_builder
from fairseq.models import FairseqEncoderModel
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from sacrebleu.metrics import BLEU
from torch import nn

from moa_fairseq.analysis.importance import ImportanceOptions, measure_importance
from moa_fairseq.analysis.importance_figures import change_figure, load_figure
from moa_fairseq.analysis.importance_journal import Journal
from moa_fairseq.analysis.importance_measuring import (
    Subject,
    Translator,
    negative_log_likelihoods,
    sample_indices,
)
from moa_fairseq.analysis.importance_section import importance_section
from moa_fairseq.analysis.text_codec import TextCodec
from moa_fairseq.errors import UsageError
from moa_fairseq.modules.recording import routed_modules

from ..figures import overlapping_texts
from ..toy import toy_model, toy_task
from ..translation import random_sentences, translation_task, with_data

LENGTHS = [3, 7, 4, 2, 6, 5, 8, 3]


@pytest.fixture
def task():
    task = translation_task()
    dictionary = task.source_dictionary
    sources = random_sentences(dictionary, LENGTHS, seed=1)
    return with_data(task, sources, random_sentences(dictionary, LENGTHS[::-1], seed=2))


@pytest.fixture
def model(task):
    return toy_model(task, max_target_positions=12).eval()


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"a checkpoint")
    return path


def options(**changes):
    # Few tokens in a batch, so that there are several.
    return ImportanceOptions(**{"sentences": 6, "max_tokens": 24, "resamples": 100, **changes})


def slow_losses(model, task, indices):
    """-log p of the target of each sentence alone, token by token."""
    dataset = task.dataset("test")
    losses = []
    for index in indices:
        source, target = dataset[index]["source"], dataset[index]["target"]
        previous = torch.cat((target[-1:], target[:-1]))
        with torch.no_grad():
            output, _ = model(source[None], torch.tensor([len(source)]), previous[None])
        total = 0.0
        for scores, token in zip(output[0].double(), target):
            total -= float(scores[token] - torch.logsumexp(scores, dim=0))
        losses.append(total)
    return losses


def without_projection(model, name, experts):
    """A copy of the model, in which the output projections of some experts are zero."""
    twin = copy.deepcopy(model)
    module = {key: module for key, _, module in routed_modules(twin)}[name]
    with torch.no_grad():
        for expert in experts:
            module.o_experts.weight[expert] = 0.0
    return twin


def test_losses_are_those_of_each_sentence_alone(task, model):
    indices = list(range(len(LENGTHS)))
    subject = Subject(model, task, "test", indices, max_tokens=24)
    assert len(subject.samples) > 1
    assert subject.losses.tolist() == pytest.approx(slow_losses(model, task, indices), abs=1e-4)
    assert subject.tokens.tolist() == [length + 1 for length in LENGTHS[::-1]]


def test_losses_add_up_to_fairseqs_nll(task, model):
    sample = task.dataset("test").collater([task.dataset("test")[index] for index in range(4)])
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    _, size, logged = criterion(model, sample)
    sums, counts = negative_log_likelihoods(model, sample, task.target_dictionary.pad())
    assert float(sums.sum()) == pytest.approx(float(logged["nll_loss"]), rel=1e-5)
    assert int(counts.sum()) == size


def test_results_of_the_encoder_may_be_given(task, model):
    sample = task.dataset("test").collater([task.dataset("test")[index] for index in range(4)])
    inputs, padding = sample["net_input"], task.target_dictionary.pad()
    encoder_out = model.encoder(inputs["src_tokens"], src_lengths=inputs["src_lengths"])
    reused, _ = negative_log_likelihoods(model, sample, padding, encoder_out)
    assert torch.equal(reused, negative_log_likelihoods(model, sample, padding)[0])


def test_a_change_is_what_zero_projections_of_the_expert_cost(task, model):
    indices = [4, 1, 7, 2, 0]
    subject = Subject(model, task, "test", indices, max_tokens=24)
    before = slow_losses(model, task, indices)
    for name, _, module in routed_modules(model):
        for experts in [*([expert] for expert in range(module.num_experts)), range(4)]:
            after = slow_losses(without_projection(model, name, experts), task, indices)
            expected = [late - early for late, early in zip(after, before)]
            assert subject.loss_changes(name, experts) == pytest.approx(expected, abs=1e-4)
    assert subject.losses.tolist() == pytest.approx(slow_losses(model, task, indices), abs=1e-4)


def test_an_expert_that_no_token_selects_changes_nothing(task, model):
    module = model.decoder.layers[1].encoder_attn
    # A router that sends every token to experts 0 and 3, whatever the token is.
    model.decoder.layers[1].encoder_attn.router.forward = lambda tokens: known_routing(tokens)
    subject = Subject(model, task, "test", list(range(8)), max_tokens=24)
    name = "decoder.layers.1.encoder_attn"
    assert subject.loss_changes(name, [1]) == [0.0] * 8
    assert all(subject.loss_changes(name, [3]))
    load = subject.loads[name]
    tokens = sum(LENGTHS) + len(LENGTHS)
    assert load.tokens == tokens
    assert load.selections.tolist() == [tokens, 0, 0, tokens]
    assert load.gates.tolist() == pytest.approx([0.75 * tokens, 0, 0, 0.25 * tokens])
    assert module.num_experts == 4


def known_routing(tokens):
    from moa_fairseq.modules.routing import Routing

    shape = tokens.shape[:-1]
    probabilities = torch.tensor([0.6, 0.1, 0.1, 0.2]).expand(*shape, 4)
    indices = torch.tensor([0, 3]).expand(*shape, 2)
    gates = torch.tensor([0.75, 0.25]).expand(*shape, 2)
    return Routing(probabilities.log(), probabilities, indices, gates)


class MaskedModel(FairseqEncoderModel):
    """The toy encoder under a projection to words, called as fairseq's masked models are."""

    def __init__(self, encoder, words):
        super().__init__(encoder)
        torch.manual_seed(5)
        self.head = nn.Linear(16, words)

    def forward(self, src_tokens, src_lengths=None, masked_tokens=None, **_):
        features = self.encoder(src_tokens, src_lengths)["encoder_out"][0].transpose(0, 1)
        return self.head(features if masked_tokens is None else features[masked_tokens]), None

    def get_normalized_probs(self, net_output, log_probs, sample=None):
        assert log_probs
        return net_output[0].float().log_softmax(dim=-1)

    def max_positions(self):
        return 1024


def masked_lm(folder):
    """fairseq's task with data in `folder`, and a model for it."""
    dictionary = toy_task().source_dictionary
    dictionary.save(str(folder / "dict.txt"))
    builder = make_builder(str(folder / "test.bin"), "mmap", vocab_size=len(dictionary))
    for sentence in random_sentences(dictionary, LENGTHS, seed=3):
        builder.add_item(sentence)
    builder.finalize(str(folder / "test.idx"))
    config = MaskedLMConfig(
        data=str(folder), sample_break_mode="complete", tokens_per_sample=12, seed=1, mask_prob=0.4
    )
    task = MaskedLMTask.setup_task(config)
    task.load_dataset("test")
    return MaskedModel(toy_model(task).encoder, len(task.source_dictionary)).eval(), task


def test_only_masked_tokens_count_in_masked_language_modelling(tmp_path):
    model, task = masked_lm(tmp_path)
    count = len(task.dataset("test"))
    subject = Subject(model, task, "test", range(count), max_tokens=24)
    pad, mask = task.source_dictionary.pad(), task.mask_idx
    masks = 0
    for index in range(count):
        sample = task.dataset("test").collater([task.dataset("test")[index]])
        tokens, target = sample["net_input"]["src_tokens"], sample["target"][0]
        logits, _ = model(tokens)
        losses = [
            float(torch.logsumexp(logits[0, place], 0) - logits[0, place, target[place]])
            for place in range(len(target))
            if target[place] != pad
        ]
        masks += int((tokens == mask).sum())
        assert subject.tokens[index] == len(losses)
        assert subject.losses[index] == pytest.approx(sum(losses), abs=1e-4)
    assert masks >= count > 3


def test_masks_are_the_same_in_every_run(tmp_path):
    digests = set()
    for run in range(2):
        (tmp_path / str(run)).mkdir()
        model, task = masked_lm(tmp_path / str(run))
        task.dataset("test").set_epoch(1 + 6 * run)  # which the masks follow
        digests.add(Subject(model, task, "test", range(4), max_tokens=24).digest)
    assert len(digests) == 1


def test_importance_of_an_encoder_only_model(checkpoint, tmp_path):
    model, task = masked_lm(tmp_path)
    measured = measure_importance(model, task, checkpoint, options(), TextCodec())
    assert [result.label for result in measured.results] == ["encoder-self 0"] * 5 + [
        "encoder-self 1"
    ] * 5
    assert all(
        result.loss.low <= result.loss.value <= result.loss.high for result in measured.results
    )
    with pytest.raises(UsageError, match="--importance-bleu-experts 2: this model does not trans"):
        measure_importance(model, task, checkpoint, options(bleu_experts=2), TextCodec())


def test_the_sample_is_seeded_and_leaves_out_what_does_not_fit(task):
    model = toy_model(task, max_source_positions=7)
    every = sample_indices(task, model, "test", 100, seed=1)
    assert sorted(every) == [index for index, length in enumerate(LENGTHS) if length < 7]
    assert sample_indices(task, model, "test", 3, seed=1) == every[:3]
    assert sample_indices(task, model, "test", 100, seed=2) != every


def test_values_are_nats_per_token_of_the_sample(task, model, checkpoint):
    measured = measure_importance(model, task, checkpoint, options(), TextCodec())
    indices = sample_indices(task, model, "test", 6, seed=1)
    before = slow_losses(model, task, indices)
    tokens = sum(LENGTHS[::-1][index] + 1 for index in indices)
    assert measured.tokens == tokens
    assert measured.loss == pytest.approx(sum(before) / tokens, abs=1e-5)
    assert len(measured.results) == 6 * (1 + 4)
    for result in measured.results[-5:-3]:  # all experts of the last module, and its first
        experts = range(4) if result.expert is None else [result.expert]
        after = slow_losses(without_projection(model, result.module, experts), task, indices)
        assert result.loss.value == pytest.approx((sum(after) - sum(before)) / tokens, abs=1e-5)


def numbers(section):
    return json.loads(json.dumps(section.numbers))


@pytest.mark.parametrize("cut", [0.4, 0.97])  # among losses, and among translations
def test_a_run_that_was_cut_short_goes_on_to_the_same_result(
    task, model, checkpoint, tmp_path, cut
):
    pytest.importorskip("matplotlib")

    def run(name):
        changed = options(journal=tmp_path / name, bleu_experts=1, bleu_sentences=2, beam=1)
        return importance_section(model, task, checkpoint, changed, TextCodec())

    whole = numbers(run("whole.jsonl"))
    lines = (tmp_path / "whole.jsonl").read_bytes()
    torn = lines[: int(cut * len(lines))]
    assert not torn.endswith(b"\n")
    (tmp_path / "torn.jsonl").write_bytes(torn)
    assert numbers(run("torn.jsonl")) == whole
    assert (tmp_path / "torn.jsonl").read_bytes() == lines


def test_a_finished_measurement_is_not_repeated(task, model, checkpoint, tmp_path, monkeypatch):
    changed = options(journal=tmp_path / "results.jsonl")
    first = measure_importance(model, task, checkpoint, changed, TextCodec())
    monkeypatch.setattr(Subject, "loss_changes", None)
    assert measure_importance(model, task, checkpoint, changed, TextCodec()) == first


@pytest.mark.parametrize("change", ["checkpoint", "sentences", "data"])
def test_a_journal_of_another_measurement_is_refused(task, model, checkpoint, tmp_path, change):
    journal = tmp_path / "results.jsonl"
    measure_importance(model, task, checkpoint, options(journal=journal), TextCodec())
    before = journal.read_bytes()
    changed = options(journal=journal, sentences=4 if change == "sentences" else 6)
    if change == "checkpoint":
        checkpoint.write_bytes(b"another")
    if change == "data":
        dictionary = task.source_dictionary
        sources = random_sentences(dictionary, LENGTHS, seed=9)
        with_data(task, sources, random_sentences(dictionary, LENGTHS[::-1], seed=2))
    with pytest.raises(UsageError, match=r"results of another measurement: \w+ is") as error:
        measure_importance(model, task, checkpoint, changed, TextCodec())
    assert "\n" not in str(error.value)
    assert journal.read_bytes() == before


def test_a_journal_whose_first_line_was_cut_short_begins_anew(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"fingerprint": {"a"')
    Journal(path, {"a": 1}).add({"b": 2})
    assert path.read_text() == '{"fingerprint": {"a": 1}}\n{"b": 2}\n'
    assert Journal(path, {"a": 1}).records == [{"b": 2}]


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", '{"fingerprint": {"a": 1}}\nnoise\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"results.jsonl: line \d is no result"):
        Journal(path, {"a": 1})
    assert path.read_text() == text


def test_bleu_changes_are_sacrebleus_of_zero_projections(task, model, checkpoint):
    """The references are what the whole model says, so that its own BLEU is 100."""
    dictionary = task.target_dictionary
    changed = options(bleu_experts=2, bleu_sentences=4, beam=1)

    def translations(of, indices):
        translator = Translator(of, task, "test", indices, 24, TextCodec(), beam=1, lenpen=1.0)
        return translator.translate()

    said = [
        dictionary.encode_line(text, add_if_not_exist=False).long()
        for text in translations(model, range(len(LENGTHS)))
    ]
    with_data(task, random_sentences(dictionary, LENGTHS, seed=1), said)
    measured = measure_importance(model, task, checkpoint, changed, TextCodec())
    assert measured.bleu == pytest.approx(100.0)
    scored = [result for result in measured.results if result.bleu is not None]
    single = [result for result in scored if result.expert is not None]
    greatest = sorted(
        (result for result in measured.results if result.expert is not None),
        key=lambda result: -abs(result.loss.value),
    )
    assert {result[:4] for result in single} == {result[:4] for result in greatest[:2]}
    assert len(scored) == 2 + 6  # and every module as a whole
    indices = sample_indices(task, model, "test", 6, seed=1)[:4]
    references = translations(model, indices)
    for result in scored:
        experts = range(4) if result.expert is None else [result.expert]
        hypotheses = translations(without_projection(model, result.module, experts), indices)
        expected = BLEU().corpus_score(hypotheses, [references]).score - 100
        assert result.bleu.value == pytest.approx(expected, abs=1e-6)
        assert result.bleu.low <= result.bleu.high <= 1e-9
    assert min(result.bleu.value for result in scored) < 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sentences": 1}, "--importance 1: it must be at least 2"),
        ({"bleu_experts": -1}, "--importance-bleu-experts -1"),
        ({"resamples": 3}, "--importance-resamples 3"),
        ({"beam": 0}, "--beam 0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        options(**changes)


def test_a_model_without_experts_is_refused(task, checkpoint):
    with pytest.raises(UsageError, match="no routed module"):
        measure_importance(nn.Linear(2, 2), task, checkpoint, options(), TextCodec())


def test_numbers_tables_and_pictures_say_the_same(task, model, checkpoint):
    pytest.importorskip("matplotlib")
    section = importance_section(model, task, checkpoint, options(), TextCodec(), name="left")
    by_place = {
        (f"{result['kind']} {result['position']}", result["expert"]): result
        for result in numbers(section)["results"]
    }
    experts, modules, _ = section.tables
    assert len(experts.rows) == 24
    assert [row[2] for row in experts.rows] == sorted(
        (row[2] for row in experts.rows), reverse=True
    )
    for row in (*experts.rows, *((row[0], None, *row[1:]) for row in modules.rows)):
        result = by_place[row[0], row[1]]["loss"]
        assert row[2:5] == (result["value"], result["low"], result["high"])
    image = section.figures[0].figure.axes[0].get_images()[0].get_array()
    labels = [text.get_text() for text in section.figures[0].figure.axes[0].get_yticklabels()]
    for row, label in enumerate(labels):
        for expert in range(4):
            assert image[row, expert] == by_place[label, expert]["loss"]["value"]
    assert {part.name.split("-")[0] for part in (*section.figures, *section.tables)} == {"left"}


class Result:
    def __init__(self, kind, position, expert):
        from moa_fairseq.analysis.resampling import Estimate

        self.kind, self.position, self.expert = kind, position, expert
        self.label = f"{kind} {position}"
        value = 0.0 if expert is None else math.sin(31 * position + 7 * expert) ** 5 / 30
        self.loss = Estimate(value, value - 0.004, value + 0.004)
        self.gate_share = 1 / 32
        self.bleu = None


@pytest.mark.parametrize("layers, experts", [(4, 32), (1, 4)])
def test_no_text_of_the_pictures_overlaps(layers, experts):
    pytest.importorskip("matplotlib")
    results = [
        Result(kind, position, expert)
        for kind in ("encoder-self", "decoder-self", "cross")
        for position in range(layers)
        for expert in (None, *range(experts))
    ]
    assert overlapping_texts(change_figure(results)) == []
    assert overlapping_texts(load_figure(results)) == []


def test_text_goes_through_tokenizer_and_subwords_and_back(task):
    class Steps:
        def __init__(self, name):
            self.name = name

        def encode(self, text):
            return f"{self.name}({text})"

        def decode(self, text):
            return f"{text}/{self.name}"

    codec = TextCodec(Steps("tokenizer"), Steps("bpe"))
    assert codec.encode("a") == "bpe(tokenizer(a))"
    assert codec.decode("a") == "a/bpe/tokenizer"
    dictionary = task.target_dictionary
    tokens = dictionary.encode_line("w1 nothing w2", add_if_not_exist=False)
    assert TextCodec().text_of(dictionary, tokens) == "w1 <unk> w2"
    assert TextCodec().text_of(dictionary, tokens, reference=True) == "w1 <<unk>> w2"
