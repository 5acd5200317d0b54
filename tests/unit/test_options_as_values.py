from __future__ import annotations

import fairseq.models.fconv
import pytest

from moa_fairseq.compat import value_of_option
from moa_fairseq.errors import UsageError
from moa_fairseq.resuming import options_of, refuse_another_model

from ..toy import SMALL


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("[(512, 3)] * 2", [(512, 3), (512, 3)]),
        (" -1e-3 ", -1e-3),
        ("True", True),
        ("{'a': 1}", {"a": 1}),
    ],
)
def test_values_are_evaluated(text, value):
    assert value_of_option(text) == value
    assert fairseq.models.fconv.eval(text) == value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["print(1)", "().__class__", "[x for x in (1,)]", "lambda: 1", "name", "9 ** 9"],
)
def test_code_is_refused(text):
    with pytest.raises(UsageError, match="is code and not a value; it was not run"):
        value_of_option(text)


def test_what_is_no_text_is_a_type_error():
    with pytest.raises(TypeError):
        value_of_option(None)


class Config:
    def __init__(self, **model):
        self.model = model


def test_only_what_a_model_computes_must_be_the_same():
    theirs = {"cfg": {"model": {"_name": "moa_transformer", **SMALL}}}
    same = {**SMALL, "_name": "moa_transformer_tiny", "dropout": 0.9, "sample_topk": 1}
    # The order of the modules and an option's default make no difference.
    same["moa_modules"] = "cross, encoder-self,decoder-self"
    refuse_another_model("checkpoint.pt", theirs, Config(**same))
    with pytest.raises(UsageError, match="--num-experts 4, and this run has --num-experts 8"):
        refuse_another_model("checkpoint.pt", theirs, Config(**{**SMALL, "num_experts": 8}))
    refuse_another_model("checkpoint.pt", theirs, Config(_name="transformer"))
    refuse_another_model("checkpoint.pt", {"cfg": None}, Config(**same))
    assert options_of(None) == {}
