from __future__ import annotations

import dataclasses

import pytest
import torch

from moa_fairseq.analysis.benchmark import Model, _compare, parse_model, table
from moa_fairseq.analysis.benchmark_subject import Setting, Subject
from moa_fairseq.errors import UsageError

SMALL = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--encoder-layers", "1"),
    *("--decoder-layers", "2", "--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
]
MODELS = {
    "stock": [
        *("--arch", "transformer", *SMALL, "--decoder-embed-dim", "16"),
        *("--decoder-ffn-embed-dim", "16"),
    ],
    "moa": ["--arch", "moa_transformer", *SMALL, "--num-experts", "4", "--head-dim", "8"],
}
SETTING = Setting(vocab_size=50, tokens=40, length=6, beam=2, module_batch=2, module_length=5)


@pytest.fixture(params=list(MODELS))
def subject(request):
    return Subject(MODELS[request.param], SETTING)


def test_sentences_are_padded_as_fairseq_pads_them(subject):
    batch = subject.sentences(7)
    pad, eos = subject.dictionary.pad(), subject.dictionary.eos()
    source, target = batch["net_input"]["src_tokens"], batch["target"]
    previous = batch["net_input"]["prev_output_tokens"]
    assert source.shape == target.shape == (7, 8)
    lengths = set()
    for words, references, inputs in zip(source, target, previous):
        length = int((words != pad).sum())
        lengths.add(length)
        assert words[:-length].eq(pad).all() and words[-1] == eos
        assert references[length:].eq(pad).all() and references[length - 1] == eos
        assert (references[: length - 1] >= subject.dictionary.nspecial).all()
        assert inputs[0] == eos
        assert inputs[1:length].equal(references[: length - 1])
        assert inputs[length:].eq(pad).all()
    assert max(lengths) == 8 and min(lengths) >= 4
    assert batch["ntokens"] == int(target.ne(pad).sum())


def test_training_is_an_update_of_fairseqs_trainer(subject):
    before = {name: value.clone() for name, value in subject.model.named_parameters()}
    _, tokens = subject.train()
    assert tokens == subject.sentences(SETTING.tokens // SETTING.length)["ntokens"]
    assert subject.trainer.get_num_updates() == 1
    optimizer = subject.trainer.optimizer.optimizer
    # fairseq 0.12.2's own Transformer has copies of its weights that are never used.
    used = [name for name in before if not name.split(".")[-1].startswith("in_proj")]
    trained = [name for name, value in subject.model.named_parameters() if value.grad is not None]
    assert set(used) >= set(trained)
    assert len(optimizer.state) == len(trained) > 0.8 * len(used)


def test_generation_runs_to_the_length_that_it_counts(subject):
    steps = []
    subject.model.decoder.layers[0].register_forward_hook(lambda *_: steps.append(1))
    _, tokens = subject.generate(3)
    assert tokens == 3 * SETTING.length
    assert len(steps) == SETTING.length + 1  # and one more for the end


def test_the_module_runs_forward_and_backward(subject):
    gradients = []
    attention = subject.model.encoder.layers[0].self_attn
    for parameter in attention.parameters():
        parameter.register_hook(lambda gradient: gradients.append(gradient.isfinite().all()))
    _, tokens = subject.module()
    assert tokens == 10
    assert len(gradients) == len(list(attention.parameters()))
    assert all(gradients)


def test_rates_are_of_what_was_done(subject, monkeypatch):
    monkeypatch.setattr(subject, "_timed", lambda work: (work(), 0.5)[1])
    assert subject.rate_of_products(100) == 2 * 100**3 / 0.5
    assert subject.rate_of_copies(1000) == 2 * 1000 / 0.5


def test_models_by_name():
    moa = parse_model("16K32E256D", ["--dropout", "0.3"])
    assert moa.name == "16K32E256D"
    assert " ".join(moa.words) == (
        "--arch moa_transformer --encoder-attention-heads 16 --decoder-attention-heads 16 "
        "--num-experts 32 --head-dim 256 --dropout 0.3"
    )
    wide = " ".join(parse_model("stock@1024").words)
    assert "--encoder-embed-dim 1024 --encoder-ffn-embed-dim 4096" in wide
    assert "--decoder-attention-heads 16" in wide
    other = parse_model("deep=--arch transformer --encoder-layers '12'")
    assert other == Model("deep", ("--arch", "transformer", "--encoder-layers", "12"))


@pytest.mark.parametrize("text", ["8K32E", "stock@", "=--arch x", "x=", "x=--arch", "8k8e8d"])
def test_other_names_of_models_are_refused(text):
    with pytest.raises(UsageError, match="give stock, stock@WIDTH"):
        parse_model(text)


def outcome():
    """Of three rounds; the second is slow for everybody, the third for one."""
    rounds = [
        [{"tokens": 100, "seconds": 1.0}, {"tokens": 50, "seconds": 1.0}],
        [{"tokens": 100, "seconds": 4.0}, {"tokens": 50, "seconds": 4.0}],
        [{"tokens": 100, "seconds": 1.0}, {"tokens": 50, "seconds": 2.0}],
    ]
    models = [Model("a", ()), Model("b", ())]
    facts = {
        "parameters": 1000,
        "macs_per_token": 10,
        "flops_per_second": 12000.0,
        "bytes_per_second": 2e9,
    }
    return {
        "conditions": {
            **{"versions": {"torch": "2"}, "python": "3", "hardware": "abacus", "threads": 1},
            **{"repeats": 3, "precision": "float32"},
        },
        "models": {"a": facts, "b": {**facts, "flops_per_second": 9000.0}},
        "results": {
            "train": _compare(models, rounds),
            "memory": {
                "a": {"bytes": 2**30, "ratio": 1.0},
                "b": {"bytes": 1.5 * 2**30, "ratio": 1.5},
            },
        },
    }


def test_speeds_are_ratios_within_a_round():
    compared = outcome()["results"]["train"]
    assert compared["a"]["speed"] == {"median": 1, "least": 1, "greatest": 1}
    assert compared["b"]["speed"] == {"median": 0.5, "least": 0.25, "greatest": 0.5}
    assert compared["b"]["tokens_per_second"] == {"median": 25, "least": 12.5, "greatest": 50}
    assert compared["b"]["seconds"] == [1.0, 4.0, 2.0]


def test_the_table_says_how_near_the_bound_training_is():
    lines = table(outcome()).splitlines()
    assert lines[2] == "| train, speed | 1.00 (1.00 to 1.00) | 0.50 (0.25 to 0.50) |"
    assert lines[3] == "| peak memory, ratio | 1.00 (1024 MiB) | 1.50 (1536 MiB) |"
    # 6 operations for each multiply-add, 100 and 25 tokens/s, of 12,000 operations/s at best.
    assert lines[4] == "| of that, products at the best rate | 50% | 12% |"
    assert lines[5] == "| parameters | 1,000 | 1,000 |"


def test_precisions_of_a_cpu():
    setting = Setting(vocab_size=50, tokens=40, length=6, precision="bfloat16")
    subject = Subject(MODELS["moa"], setting)
    subject.train()
    assert {parameter.dtype for parameter in subject.model.parameters()} == {torch.bfloat16}
    subject.module()
    subject.generate(2)


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs torch 2.0")
def test_what_is_measured_is_compiled_where_that_is_wanted(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    for wanted in (False, True):
        subject = Subject(MODELS["moa"], dataclasses.replace(SETTING, compiled=wanted))
        for _ in range(2):
            subject.module()
    assert compiled == [subject.model, subject.model.encoder.layers[0].self_attn]
