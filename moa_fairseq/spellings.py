"""Other spellings of command-line options: those of the authors' code.

fairseq fills argparse from the fields of a config class. A :class:`SpellingParser` stands between
the two and gives options their other spellings; config classes, and so hydra, know only ours.
"""

from __future__ import annotations

import argparse
import weakref
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .errors import UsageError


class Spelling(NamedTuple):
    """Another spelling of an option.

    Attributes:
        flag: the option as the config class has it.
        other: its other spelling.
        values: our value by theirs, where the other spelling has values of its own.
        help: what is to be known of a spelling with values of its own.
    """

    flag: str
    other: str
    values: Optional[Mapping[str, Any]] = None
    help: str = ""


MODEL_SPELLINGS = (
    Spelling("--num-experts", "--num-expert"),
    Spelling("--ffn-type", "--ffd-type"),
    Spelling(
        "--router-noise",
        "--gating",
        {"normal": False, "noisy": True},
        "the authors' name for --router-noise (noisy) or none (normal); what they call gating is "
        "not how gates are normalised, for which they have --gate-normalization none",
    ),
)
LOSS_SPELLINGS = (
    Spelling("--load-balance-weight", "--switchloss"),
    Spelling("--router-z-weight", "--zloss"),
    Spelling("--load-cv-squared-weight", "--cvloss"),
)


class SpellingParser:
    """Passes `add_argument` on to a parser, with the other spellings of what is added.

    Where an option is given in two spellings with different values, parsing ends in a
    `UsageError`; in one spelling twice, the last one counts, as argparse has it.

    Args:
        parser: an `ArgumentParser` or one of its groups.
        spellings: other spellings of options that are going to be added.
    """

    def __init__(self, parser: Any, spellings: Sequence[Spelling]) -> None:
        self.parser = parser
        self.spellings = {spelling.flag: spelling for spelling in spellings}

    def add_argument(self, *flags: str, **options: Any) -> None:
        spelling = self.spellings.get(flags[0])
        if spelling is None:
            self.parser.add_argument(*flags, **options)
            return
        action = _one_value_action()
        if options.get("action") == "store_true":
            options.update(nargs=0, const=True)
        options["action"] = action
        if spelling.values is None:
            note = f" (in the authors' code {spelling.other})"
            options["help"] = (options.get("help") or "") + note
            self.parser.add_argument(*flags, spelling.other, **options)
            return
        self.parser.add_argument(*flags, **options)
        self.parser.add_argument(
            spelling.other,
            dest=flags[0].lstrip("-").replace("-", "_"),
            action=action,
            choices=list(spelling.values),
            const=spelling.values,
            default=options.get("default", argparse.SUPPRESS),
            help=spelling.help,
        )


def _one_value_action() -> type:
    """An argparse action that stores a value and remembers in which spelling it came.

    What came before is remembered for the namespace that is being filled: fairseq parses a
    command line several times with the same parser.
    """
    given: List[Tuple[Any, str, str, Any]] = []  # namespace, spelling, text, value

    class StoreOneValue(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            option_string: Optional[str] = None,
        ) -> None:
            value, text = values, f"{option_string} {values}"
            if self.nargs == 0:
                value, text = self.const, str(option_string)
            elif isinstance(self.const, Mapping):
                value = self.const[values]
            for filled, spelling, earlier, other in given:
                if filled() is namespace and spelling != option_string and other != value:
                    raise UsageError(
                        f"{earlier} and {text} are two spellings of one option with different "
                        "values; give one of them"
                    )
            given[:] = [entry for entry in given if entry[0]() is namespace]
            given.append((weakref.ref(namespace), str(option_string), text, value))
            setattr(namespace, self.dest, value)

    return StoreOneValue
