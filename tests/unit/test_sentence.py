from __future__ import annotations

import json

import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig

from moa_fairseq.analysis.sentence import (
    SentenceOptions,
    chosen_for_maps,
    encode_with_masks,
    view_sentence,
)
from moa_fairseq.analysis.sentence_figures import (
    attention_figure,
    fonts_for,
    numbered,
    routing_figure,
)
from moa_fairseq.analysis.sentence_section import sentence_section
from moa_fairseq.analysis.text_codec import TextCodec
from moa_fairseq.errors import UsageError
from moa_fairseq.modules.recording import record_head_weights, record_routings

from ..figures import overlapping_texts
from ..toy import toy_model
from ..translation import translation_task, with_data
from .test_importance import masked_lm

SOURCE, TARGET = "w3 w1 w4 w1 w5", "w9 w2 w6"


class SplitWords:
    """Subwords: every word in two pieces, as a letter and a number."""

    def encode(self, text):
        return " ".join(f"{word[0]} {word[1:]}" for word in text.split())

    def decode(self, text):
        pieces = text.split()
        return " ".join(map("".join, zip(pieces[::2], pieces[1::2])))


@pytest.fixture
def task():
    return translation_task()


@pytest.fixture
def model(task):
    return toy_model(task, heads_per_expert=2, max_target_positions=12).eval()


def view(model, task, **options):
    return view_sentence(model, task, SentenceOptions(SOURCE, **options), TextCodec())


def test_a_view_is_what_the_model_does_with_the_target_as_its_input(task, model):
    dictionary = task.source_dictionary
    source = dictionary.encode_line(SOURCE).long()
    target = dictionary.encode_line(TARGET).long()
    previous = torch.cat((target[-1:], target[:-1]))
    with record_routings(model) as routings, record_head_weights(model) as weights:
        model(source[None], torch.tensor([6]), previous[None])
    seen = view(model, task, target=TARGET)
    assert (seen.target, seen.own_translation) == (TARGET, False)
    assert seen.source_tokens == ("w3", "w1", "w4", "w1", "w5", "</s>")
    assert seen.target_tokens == ("w9", "w2", "w6", "</s>")
    assert [module.name for module in seen.modules] == [entry.name for entry in routings]
    steps = ("</s> → w9", "w9 → w2", "w2 → w6", "w6 → </s>")
    for module, entry, recorded in zip(seen.modules, routings, weights):
        assert torch.equal(module.indices, entry.routing.indices[0])
        assert torch.equal(module.gates, entry.routing.gates[0])
        decoder = module.name.startswith("decoder")
        assert module.queries == (steps if decoder else seen.source_tokens)
        inputs = ("</s>", "w9", "w2", "w6")
        assert module.keys == (inputs if module.kind == "decoder-self" else seen.source_tokens)
        assert module.weights.shape == (len(module.queries), 2, 2, len(module.keys))
        for token in range(len(module.queries)):
            for rank in range(2):
                for head in range(2):
                    row = recorded.weights[2 * rank + head, 0, token]
                    assert torch.equal(module.weights[token, rank, head], row)
                    assert float(row.sum()) == pytest.approx(1, abs=1e-5)


def test_without_a_target_the_models_own_translation_is_taken(task, model):
    sources = [task.source_dictionary.encode_line(SOURCE).long()]
    with_data(task, sources, sources)
    sample = task.dataset("test").collater([task.dataset("test")[0]])
    generator = task.build_generator([model], GenerationConfig(beam=3))
    best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
    own = view(model, task, beam=3)
    assert own.own_translation
    assert own.target_tokens == tuple(task.target_dictionary[int(token)] for token in best)
    previous = torch.cat((best[-1:], best[:-1]))
    with record_routings(model) as routings:
        model(**{**sample["net_input"], "prev_output_tokens": previous[None]})
    for module, entry in zip(own.modules, routings):
        assert torch.equal(module.gates, entry.routing.gates[0])


def test_raw_text_is_encoded_as_the_task_does(task, model):
    for piece in ("w", "3", "1"):
        task.source_dictionary.add_symbol(piece)
    options = SentenceOptions("w3 w1", "w1")
    seen = view_sentence(toy_model(task), task, options, TextCodec(bpe=SplitWords()))
    assert seen.source_tokens == ("w", "3", "w", "1", "</s>")
    assert seen.target_tokens == ("w", "1", "</s>")


def test_keys_of_cross_self_attention_begin_with_the_source(task):
    model = toy_model(task, cross_self_attention=True).eval()
    seen = view(model, task, target=TARGET)
    own = [module for module in seen.modules if module.kind == "decoder-self"]
    for module in own:
        assert module.keys == (*seen.source_tokens, "</s>", "w9", "w2", "w6")
        assert module.weights.shape[-1] == len(module.keys)


def test_an_encoder_only_model_has_masks_and_no_target(tmp_path):
    model, task = masked_lm(tmp_path)
    mask = task.mask_idx
    tokens = encode_with_masks("w1 <mask> w2<mask>", task, TextCodec(bpe=SplitWords()))
    dictionary = task.source_dictionary
    unknown = dictionary.unk()
    expected = [dictionary.bos(), unknown, unknown, mask, unknown, unknown, mask, dictionary.eos()]
    assert tokens.tolist() == expected
    seen = view_sentence(model, task, SentenceOptions("w3 w4"), TextCodec())
    assert seen.source_tokens == ("<s>", "w3", "w4", "</s>")
    assert (seen.target, seen.target_tokens) == (None, ())
    with record_routings(model) as routings:
        model(torch.tensor([[0, *dictionary.encode_line("w3 w4").tolist()]]))
    for module, entry in zip(seen.modules, routings):
        assert torch.equal(module.indices, entry.routing.indices[0])
    with pytest.raises(UsageError, match="--sentence-target: this model has no target"):
        view_sentence(model, task, SentenceOptions("w3", "w4"), TextCodec())


def test_feed_forwards_have_routing_and_no_attention(task):
    seen = view(toy_model(task, ffn_type="moe").eval(), task, target=TARGET)
    forwards = [module for module in seen.modules if module.kind.endswith("ffn")]
    assert len(forwards) == 4
    assert all(module.weights is None and not module.keys for module in forwards)
    assert not set(forwards) & set(chosen_for_maps(seen, "all"))


@pytest.mark.parametrize(
    "maps, names",
    [
        ("last", ["encoder.layers.1.self_attn", "decoder.layers.1.self_attn"]),
        ("encoder.layers.0.self_attn", ["encoder.layers.0.self_attn"]),
    ],
)
def test_modules_of_maps(task, model, maps, names):
    chosen = [module.name for module in chosen_for_maps(view(model, task, target=TARGET), maps)]
    assert chosen[: len(names)] == names
    assert len(chosen_for_maps(view(model, task, target=TARGET), "all")) == 6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": " "}, "--sentence is empty"),
        ({"source": "w1", "target": ""}, "--sentence-target is empty"),
        ({"source": "w1 " * 200}, "--sentence has 201 tokens, and a picture holds 128"),
        ({"source": "w1", "target": "w1 " * 128}, "--sentence-target has 129 tokens"),
        ({"source": "w1", "target": "w1", "maps": "last,x"}, "--sentence-maps last: no such"),
    ],
)
def test_what_cannot_be_shown_is_refused(task, model, options, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=message):
        sentence_section(model, task, SentenceOptions(**options), TextCodec())


def test_tables_numbers_and_pictures_say_the_same(task, model):
    pytest.importorskip("matplotlib")
    options = SentenceOptions(SOURCE, TARGET)
    section = sentence_section(model, task, options, TextCodec(), name="one")
    numbers = json.loads(json.dumps(section.numbers))
    tokens, routing, attention = section.tables
    assert [row[2] for row in tokens.rows] == [
        *(*SOURCE.split(), "</s>"),
        *(*TARGET.split(), "</s>"),
    ]
    sums: dict = {}
    for module, place, expert, head, _, weight in attention.rows:
        key = module, place, expert, head
        sums[key] = sums.get(key, 0.0) + weight
    assert all(total == pytest.approx(1, abs=1e-4) for total in sums.values())
    pictures = {figure.name: figure.figure for figure in section.figures}
    assert len(pictures) == 6 + 3
    for module in numbers["modules"]:
        rows = [row for row in routing.rows if row[0] == module["name"]]
        gates = {(row[1], row[3]): row[4] for row in rows}
        picture = pictures[f"one-routing-{module['kind']}-{module['position']}"]
        image = picture.axes[0].get_images()[0].get_array()
        for place, (selected, given) in enumerate(zip(module["selected"], module["gates"])):
            assert {(place, expert) for expert in selected} == {
                key for key in gates if key[0] == place
            }
            for expert, gate in zip(selected, given):
                assert gates[place, expert] == gate
                assert image[place, expert] == pytest.approx(gate, abs=1e-6)
        assert image.mask.sum() == 2 * len(module["tokens"])  # K = 2 of 4
        drawn = pictures.get(f"one-attention-{module['kind']}-{module['position']}")
        if drawn is not None:
            check_maps(drawn, module)


def check_maps(figure, module):
    """Titles and pixels of each map, against the numbers."""
    maps = [axes for axes in figure.axes if axes.get_images()]
    titles = [text.get_text() for text in figure.texts if text.get_text().startswith("expert")]
    expected = []
    for expert in range(4):
        users = [place for place, chosen in enumerate(module["selected"]) if expert in chosen]
        expected += [(expert, head, users) for head in range(2) if users]
    assert len(maps) == len(titles) == len(expected)
    for axes, title, (expert, head, users) in zip(maps, titles, expected):
        assert title.startswith(f"expert {expert}, head {head} ({len(users)} token")
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == [f"{place} {module['tokens'][place]}" for place in users]
        for row, place in zip(axes.get_images()[0].get_array(), users):
            rank = module["selected"][place].index(expert)
            weights = module["attention"][place][rank][head]
            assert row.tolist() == pytest.approx(weights, abs=1e-6)


@pytest.mark.parametrize("length, experts", [(4, 32), (39, 8)])
def test_no_text_of_the_pictures_overlaps(task, length, experts):
    """With words of wide letters, too long for a label, and of other scripts."""
    pytest.importorskip("matplotlib")
    words = ("▁WWWWWWWWWWWWWWWWWW", "Übergrößenträger", "$x_1$", "и", "▁m")
    for word in words:
        task.source_dictionary.add_symbol(word)
    model = toy_model(task, num_experts=experts, encoder_layers=1, decoder_layers=1).eval()
    text = " ".join(words[place % len(words)] for place in range(length))
    seen = view_sentence(model, task, SentenceOptions(text, text), TextCodec())
    fonts = fonts_for(text)
    assert not fonts.missing
    for module in seen.modules:
        assert overlapping_texts(routing_figure(module, fonts)) == []
    assert overlapping_texts(attention_figure(seen.modules[-1], fonts)) == []


def test_a_token_that_no_font_has_is_its_place():
    pytest.importorskip("matplotlib")
    fonts = fonts_for("a → \U000f0000")
    assert fonts.missing == {"\U000f0000"}
    assert numbered(["a", "b\U000f0000", "a → b\U000f0000", "a" * 15], fonts) == [
        "0 a",
        "1",
        "2",
        "3 " + "a" * 13 + "…",
    ]


def test_a_section_says_which_characters_have_no_font(task, caplog):
    pytest.importorskip("matplotlib")
    task.source_dictionary.add_symbol("\U000f0000")
    section = sentence_section(
        toy_model(task, max_target_positions=12),
        task,
        SentenceOptions("w1 \U000f0000", "w2"),
        TextCodec(),
    )
    assert any("shown by their place alone" in text for text in section.paragraphs)
    assert "no installed font has \U000f0000" in caplog.text
    labels = [text.get_text() for text in section.figures[0].figure.axes[0].get_yticklabels()]
    assert labels == ["0 w1", "1", "2 </s>"]
