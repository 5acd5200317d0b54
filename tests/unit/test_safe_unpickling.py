"""The reader of checkpoints for torch before 2.4; it reads and refuses the same with any torch."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
from collections import OrderedDict

import pytest
import torch

from moa_fairseq.safe_unpickling import reader

NAMED = {
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
}


@pytest.fixture
def load():
    module = reader(NAMED, (OrderedDict, argparse.Namespace))
    return lambda data: module.load(io.BytesIO(data), encoding="utf-8")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_named_is_read(load, protocol):
    state = {"args": argparse.Namespace(lr=[0.1], arch="x"), "order": OrderedDict(a=1, b=(2, None))}
    assert load(pickle.dumps(state, protocol)) == state


def named(module, name):
    """The name of an object in protocol 4, where a name may have dots."""
    parts = [b"\x8c" + struct.pack("B", len(part)) + part.encode() for part in (module, name)]
    return b"\x80\x04" + b"".join(parts) + b"\x93"


@pytest.mark.parametrize(
    "data",
    [
        b"cposix\nmkdir\n(S'/tmp/made'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'/tmp/made'\niposix\nmkdir\n.",
        named("argparse", "Namespace.__init__.__globals__") + b".",
        named("argparse", "ArgumentParser") + b".",
        named("torch._utils", "_rebuild_tensor_v2.__globals__") + b".",
        b"\x80\x02\x82\x01.",  # copyreg's extension registry
    ],
    ids=str,
)
def test_no_other_name_is_found(load, data):
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        load(data)


@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"R.", b"\x80\x02}"], ids=str)
def test_damage_is_not_taken_for_another_error(load, data):
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        load(data)


@pytest.mark.parametrize(
    "receiver",
    [named("argparse", "Namespace"), named("torch._utils", "_rebuild_tensor_v2")],
    ids=["class", "function"],
)
def test_a_file_sets_no_attribute_of_a_class_or_function(load, receiver):
    # BUILD with a pair: the second is a dictionary of attributes to set.
    attributes = b"N}\x8c\x04markK\x01s\x86b."
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        load(receiver + attributes)
    assert not hasattr(argparse.Namespace, "mark")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "mark")
    # Python's own reader sets it, which is what the test is about.
    pickle.loads(receiver + attributes)
    for owner in (argparse.Namespace, torch._utils._rebuild_tensor_v2):
        if hasattr(owner, "mark"):
            del owner.mark
            break
    else:
        pytest.fail("the attack does not work with Python's own reader either")
