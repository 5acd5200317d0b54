"""Identities of the whole model."""

from __future__ import annotations

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from moa_fairseq.errors import CheckpointMismatch

from ..toy import toy_model, toy_sample, toy_task

OPTIONS = [
    {},
    {"heads_per_expert": 2, "num_experts": 2},
    {"moa_modules": "cross"},
    {"ffn_type": "moe"},
]


def decode(model, encoder_out, tokens, reorder_at=None, order=None):
    """Logits of each step, the beam reordered before step `reorder_at`."""
    state, steps = {}, []
    for length in range(1, tokens.shape[1] + 1):
        if length == reorder_at:
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            tokens = tokens[order]
        logits, _ = model.decoder(
            tokens[:, :length], encoder_out=encoder_out, incremental_state=state
        )
        steps.append(logits[:, -1])
    return steps


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_step_by_step_equals_the_full_pass(options):
    task = toy_task()
    model = toy_model(task, **options).eval()
    inputs = toy_sample(task, [3, 6, 5], [4, 4, 4])["net_input"]
    full, _ = model(**inputs)
    encoder_out = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
    steps = decode(model, encoder_out, inputs["prev_output_tokens"])
    torch.testing.assert_close(torch.stack(steps, dim=1), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_step_by_step_with_prefixes_of_different_lengths(options):
    task = toy_task()
    model = toy_model(task, **options).eval()
    sample = toy_sample(task, [3, 6], [5, 2])
    inputs = sample["net_input"]
    real = sample["target"].ne(task.src_dict.pad())
    full, _ = model(**inputs)
    encoder_out = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
    steps = torch.stack(decode(model, encoder_out, inputs["prev_output_tokens"]), dim=1)
    torch.testing.assert_close(steps[real], full[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reordering_the_beam_equals_reindexing_the_batch(options):
    task = toy_task()
    model = toy_model(task, **options).eval()
    inputs = toy_sample(task, [3, 6, 5], [4, 4, 4])["net_input"]
    order = torch.tensor([2, 2, 0, 1, 1])
    encoder_out = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
    tokens = inputs["prev_output_tokens"]
    reordered = decode(model, encoder_out, tokens, reorder_at=4, order=order)[3:]
    chosen = model.encoder.reorder_encoder_out(encoder_out, order)
    expected = decode(model, chosen, tokens[order])[3:]
    torch.testing.assert_close(reordered, expected)


def test_padding_changes_no_output():
    task = toy_task()
    model = toy_model(task).eval()
    sample = toy_sample(task, [3, 6], [4, 2])
    padded = toy_sample(task, [3, 6], [4, 2], extra_padding=5)
    output, _ = model(**sample["net_input"])
    with_padding, _ = model(**padded["net_input"])
    real = sample["target"].ne(task.source_dictionary.pad())
    torch.testing.assert_close(
        with_padding[:, : output.shape[1]][real], output[real], atol=1e-5, rtol=1e-4
    )


def test_a_checkpoint_of_another_model_is_one_line_where_fairseq_loads_it():
    task = toy_task()
    other = toy_model(task, num_experts=6).state_dict()
    model = toy_model(task)
    with pytest.raises(CheckpointMismatch, match=r"not of this model.*size mismatch") as error:
        model.load_state_dict(other, model_cfg=model.cfg)
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError):
        model.load_state_dict(other)


# What the weights of eos are multiplied by, so that sentences leave the beam at different steps.
WEIGHTS_OF_EOS = [1, -3, 2, 2]


def searching_model(task, options, weight_of_eos):
    model = toy_model(task, **options).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight[task.target_dictionary.eos()] *= weight_of_eos
    return model


def search(model, task, sample, beam, share=True):
    """Tokens and scores of beam search, with or without hypotheses that share keys."""
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_b=12)
    if not share:
        model.set_beam_size(1)
    found = generator.generate([model], sample)
    return [
        [(hypothesis["tokens"].tolist(), float(hypothesis["score"])) for hypothesis in sentence]
        for sentence in found
    ]


@pytest.mark.parametrize(("options", "weight"), zip(OPTIONS, WEIGHTS_OF_EOS), ids=str)
def test_hypotheses_that_share_the_keys_of_their_sentence_change_no_translation(options, weight):
    task = toy_task()
    model = searching_model(task, options, weight)
    sample = toy_sample(task, [3, 6, 5, 1, 4, 6], [1] * 6)
    shared = search(model, task, sample, 3)
    alone = search(searching_model(task, options, weight), task, sample, 3, share=False)
    assert len({len(sentence[0][0]) for sentence in shared}) > 1
    for ours, expected in zip(shared, alone):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
        assert [score for _, score in ours] == pytest.approx([score for _, score in expected])
    # Keys are shared only where they are equal. fairseq says nothing of a beam of 1, where
    # neighbours are sentences of their own.
    single = search(model, task, sample, 1)
    assert single == search(searching_model(task, options, weight), task, sample, 1)


def test_hypotheses_of_a_sentence_have_one_row_of_keys():
    task = toy_task()
    model = toy_model(task).eval()
    rows = []

    for layer in model.decoder.layers:
        reorder = layer.encoder_attn.reorder_incremental_state

        def noted(state, order, attention=layer.encoder_attn, reorder=reorder):
            if attention._get_input_buffer(state):
                rows.append((len(attention._get_input_buffer(state)["prev_key"]), len(order)))
            return reorder(state, order)

        layer.encoder_attn.reorder_incremental_state = noted
    search(model, task, toy_sample(task, [3, 6, 5, 1, 4, 6], [1] * 6), 3)
    assert rows
    assert rows[0] == (6, 18)
    # A sentence that ends leaves with its beam, at the next reordering.
    assert all(sentences * 3 >= hypotheses for sentences, hypotheses in rows)
    assert rows[-1][0] < 6
