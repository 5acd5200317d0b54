"""Reading checkpoints without running anything, with torch before 2.4.

`torch.load(weights_only=True)` of those versions reads tensors alone, and can be told of no further
class that is safe. Here is a reader that can.
"""

from __future__ import annotations

import collections
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar, Dict, Sequence

import torch


def read_only(objects: Sequence[Any]) -> None:
    """Let `torch.load(weights_only=True)` read these classes and functions, and torch's own.

    Args:
        objects: what a file may name besides tensors and what they are made of. Objects of the
            classes among them get the attributes that the file has for them.
    """
    named = dict(torch._weights_only_unpickler._get_allowed_globals())
    named.update({f"{each.__module__}.{each.__qualname__}": each for each in objects})
    classes = tuple(each for each in objects if isinstance(each, type))
    torch.serialization._weights_only_unpickler = reader(
        named, (torch.Tensor, collections.OrderedDict, *classes)
    )


def reader(named: Dict[str, Any], with_attributes: Sequence[type]) -> Any:
    """What torch needs of a module like `pickle`, reading no other names than these.

    Args:
        named: classes and functions by module and name.
        with_attributes: objects of these classes get attributes from the file.

    Raises:
        pickle.UnpicklingError: (on reading) for another name, saying which.
    """

    # In Python, since the one in C would let a file set attributes of classes and functions.
    class AllowedUnpickler(pickle._Unpickler):
        dispatch: ClassVar[Dict[int, Any]] = dict(pickle._Unpickler.dispatch)

        def load(self) -> Any:
            try:
                return super().load()
            except (KeyError, IndexError) as error:  # no such instruction; nothing to work on
                raise pickle.UnpicklingError(f"not a pickle: {error!r}") from error

        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in named:
                raise pickle.UnpicklingError(f"Unsupported global: {module}.{name}")
            return named[f"{module}.{name}"]

        def get_extension(self, code: int) -> None:
            raise pickle.UnpicklingError(f"Unsupported global: extension {code}")

        def load_build(self) -> None:
            receiver = self.stack[-2]  # type: ignore[attr-defined]
            if not isinstance(receiver, tuple(with_attributes)):
                raise pickle.UnpicklingError(f"Unsupported global: attributes of {receiver!r}")
            super().load_build()  # type: ignore[misc]

        dispatch[pickle.BUILD[0]] = load_build

    def load(file: Any, **options: Any) -> Any:
        return AllowedUnpickler(file, **options).load()

    return SimpleNamespace(Unpickler=AllowedUnpickler, load=load, __name__=__name__)
