"""What fairseq's commands are given by mistake, said in one line with its remedy.

fairseq answers many a plain mistake with a traceback: a folder that is not there, a checkpoint of
another model. Importing this module lets its commands end in one line instead. What is not known
here keeps its traceback, and in Python every error stays as fairseq raises it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import re
import traceback
from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, Type

from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from hydra.core import utils as hydra_utils
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from .errors import UsageError, describe_mismatch, first_line, refused_file
from .masked_lm_checks import check_masked_lm


class Mistake(NamedTuple):
    """One of fairseq's messages, and what to say instead.

    Attributes:
        kind: class of the exception.
        pattern: regular expression that is searched in its message.
        line: what to say; `{0}` stands for the message's first line, `{1}`, … for groups.
    """

    kind: Type[BaseException]
    pattern: str
    line: str


MISTAKES: Tuple[Mistake, ...] = (
    Mistake(
        Exception,
        r"^Could not infer language pair",
        "the data folder holds no binarised text (NAME.SOURCE-TARGET.LANGUAGE.idx); give the "
        "--destdir of fairseq-preprocess, which scripts/prepare.sh calls data/",
    ),
    Mistake(
        FileNotFoundError,
        r"'(.*)/dict\.([^/']+)\.txt'$",
        "the data folder {1} has no dictionary of language {2}; give the --destdir of "
        "fairseq-preprocess, and its --source-lang and --target-lang",
    ),
    Mistake(
        FileNotFoundError,
        r"'(.*)/dict\.txt'$",
        "the data folder {1} has no dictionary dict.txt of one language; give the --destdir of "
        "fairseq-preprocess --only-source, which scripts/prepare_wikitext103.sh calls data/",
    ),
    Mistake(
        FileNotFoundError,
        r"^Dataset not found: (\S+) \((.*)\)",
        "the data folder {2} has no split {1}; binarise one with fairseq-preprocess, or name "
        "another with --train-subset, --valid-subset or --gen-subset",
    ),
    Mistake(
        OSError,
        r"^Model file not found: (.*)",
        "--path {1}: no such checkpoint; give one that fairseq-train wrote",
    ),
    # Of a vocabulary of subwords, from `--sentencepiece-model` or `--bpe-codes`.
    Mistake(OSError, r"^file (.*) not found$", "{1}: no such file; give the path of one"),
    Mistake(
        ValueError,
        r"^--f[ui]netune-from-model (.*) does not exist",
        "--finetune-from-model {1}: no such checkpoint; give one that fairseq-train wrote",
    ),
    Mistake(
        AssertionError,
        r"^Must specify batch size",
        "neither --max-tokens nor --batch-size is given; give one, for instance --max-tokens 4096",
    ),
    Mistake(
        AssertionError,
        r"^Sentences lengths should not exceed max_tokens=(\d+)",
        "--max-tokens {1}: a sentence is longer; raise it, or leave long sentences out with "
        "--max-source-positions, --max-target-positions and --skip-invalid-size-inputs-valid-test",
    ),
    Mistake(
        Exception,
        r"^Could not infer task type",
        "task._name is no known task; give another, such as translation",
    ),
    Mistake(
        Exception,
        r"^The dataset is empty",
        "no training pair is left: the data are empty, or every pair is longer than "
        "--max-source-positions or --max-target-positions (of masked_lm: --tokens-per-sample); "
        "raise them or give other data",
    ),
    Mistake(
        ValueError,
        r"^cannot mmap an empty file",
        "a split of the data is empty; binarise text that has lines with fairseq-preprocess",
    ),
    Mistake(
        Exception,
        r"^Size of sample #(\d+) is invalid",
        "sentence {1} is longer than --max-source-positions or --max-target-positions (of "
        "masked_lm: --tokens-per-sample); raise them, or leave such sentences out with "
        "--skip-invalid-size-inputs-valid-test",
    ),
    Mistake(
        AssertionError,
        r"CUDA|[Cc]uda",
        "no GPU can be used here ({0}); on a CPU leave --fp16 out, or add "
        "--fp16-no-flatten-grads and a small --fp16-init-scale",
    ),
    Mistake(
        AssertionError,
        r"^embed_dim must be divisible by num_heads",
        "--encoder-attention-heads and --decoder-attention-heads must divide --encoder-embed-dim "
        "and --decoder-embed-dim in attentions that are not MoA; choose a divisor",
    ),
    Mistake(
        AssertionError,
        r"^min_len cannot be larger than max_len",
        "--min-len is larger than the longest translation that --max-len-a and --max-len-b allow; "
        "lower the one or raise the others",
    ),
    Mistake(
        AssertionError,
        r"^--batch-size cannot be larger than --buffer-size",
        "--batch-size is larger than --buffer-size; lower the one or raise the other",
    ),
    Mistake(
        Exception,
        r"^(--\S.*(?:requires?|not compatible with) .*)",
        "{1}; give what goes together, or leave the option out",
    ),
    Mistake(
        ValueError,
        r"^malformed node or string",
        "--model-overrides is not a Python dictionary of values; give for instance "
        "\"{{'dropout': 0.1}}\"",
    ),
    Mistake(
        UnicodeDecodeError,
        r"can't decode (byte 0x\w\w)",
        "the input is not UTF-8 ({1}); convert it, for instance with: iconv -f LATIN1 -t UTF-8",
    ),
)


def line_of(error: BaseException) -> Optional[str]:
    """One line on the mistake that fairseq answered with `error`; None where it is not known."""
    if isinstance(error, UsageError):
        return str(error)
    if "Cannot load model parameters from checkpoint" in str(error):
        return _line_of_loading(error)
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        return describe_mismatch(error)
    if isinstance(error, OmegaConfBaseException):
        return _line_of_config(error)
    if isinstance(error, KeyError) and _raised_in(error) == "fairseq.registry.build_x":
        return f"{error} is no known _name; mend its spelling, or give another"
    if _raised_in(error) == "fairseq.models.build_model":
        return (
            "model._name is no model that a YAML can name; give another, such as moa_transformer "
            "or dense_transformer"
        )
    for mistake in MISTAKES:
        found = re.search(mistake.pattern, str(error))
        if found and isinstance(error, mistake.kind):
            return mistake.line.format(first_line(error), *found.groups())
    if isinstance(error, OSError) and error.filename and error.strerror:
        return refused_file(error)
    return None


def _line_of_config(error: OmegaConfBaseException) -> str:
    line, key = first_line(error), error.full_key or ""
    missing = re.search(r"missing mandatory value: (\w+)", line, re.IGNORECASE)
    if missing:
        return f"--{missing[1].replace('_', '-')} is missing; give it (in a YAML {missing[1]})"
    if isinstance(error, ConfigKeyError):
        return f"{line}; mend its spelling, or move it to the section that has such an option"
    return f"{key}: {line}; give a value that fits the option"


def _raised_in(error: BaseException) -> str:
    """The module and function that raised an exception."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    return place


def _line_of_loading(error: BaseException) -> Optional[str]:
    """fairseq's trainer hides what it caught while it loaded a checkpoint."""
    path = re.search(r"from checkpoint (.*); please", str(error))
    cause = error.__context__
    if path is None or cause is None or "loading state_dict" not in str(cause):
        return None
    return f"{path[1]}: {describe_mismatch(cause)}"


@contextmanager
def one_line_for_mistakes() -> Iterator[None]:
    """Raise a `UsageError` for a known mistake of the block, from fairseq's own exception."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        raise UsageError(line) from error


def check_training(cfg: Any) -> None:
    """Refuse settings on which fairseq would stumble later, or not at all.

    Args:
        cfg: a config of fairseq's trainer.

    Raises:
        UsageError: naming flag, value and remedy.
    """
    _check_names(cfg)
    if cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        raise UsageError(
            "--bf16 and --tpu ask fairseq for a TPU, and torch_xla is not installed; for bfloat16 "
            "train with fairseq-hydra-train and common.bf16=true"
        )
    _at_least_one("--update-freq", *cfg.optimization.update_freq)
    _at_least_one("--max-tokens", cfg.dataset.max_tokens)
    _at_least_one("--batch-size", cfg.dataset.batch_size)


def _check_names(cfg: Any) -> None:
    """fairseq takes no notice of sections and options in a YAML that it does not know."""
    known = FairseqConfig.__dataclass_fields__
    names = {"": [*known, "job_logging_cfg"]}  # the latter is fairseq's own
    for section, field in known.items():
        if dataclasses.is_dataclass(field.type):
            names[section] = list(field.type.__dataclass_fields__)
    for section, options in names.items():
        for name in OmegaConf.to_container(cfg[section] if section else cfg, resolve=False):
            if name not in options:
                close = difflib.get_close_matches(name, options, 1)
                remedy = f"did you mean {close[0]}?" if close else "leave it out"
                where = f"{section}.{name}" if section else name
                raise UsageError(f"{where}: fairseq has no such option; {remedy}")


def check_generation(cfg: Any) -> None:
    """As :func:`check_training`, for translating with a config of fairseq's."""
    if cfg.common_eval.path is None:
        raise UsageError("--path is missing; give the checkpoint to translate with")
    _at_least_one("--beam", cfg.generation.beam)
    _at_least_one("--nbest", cfg.generation.nbest)
    _at_least_one("--max-tokens", cfg.dataset.max_tokens)
    _at_least_one("--batch-size", cfg.dataset.batch_size)


def _at_least_one(flag: str, *values: Optional[float]) -> None:
    for value in values:
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: it must be at least 1")


def end_in_one_line() -> None:
    """Let fairseq's commands end in one line for the mistakes that are known here."""
    original, original_trainer = distributed_utils.call_main, Trainer.__init__
    if getattr(original, "ends_in_one_line", False):
        return

    @functools.wraps(original)
    def call_main(cfg: Any, main: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with one_line_for_mistakes():
            if main.__module__ == "fairseq_cli.interactive":
                check_generation(cfg)
            check_masked_lm(getattr(cfg, "task", None))
            return original(cfg, main, *args, **kwargs)

    @functools.wraps(original_trainer)
    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        check_training(cfg)
        original_trainer(self, cfg, *args, **kwargs)

    call_main.ends_in_one_line = True  # type: ignore[attr-defined]
    distributed_utils.call_main = call_main
    Trainer.__init__ = __init__
    _wrap_generation()
    _wrap_hydra()


def _wrap_generation() -> None:
    """`fairseq-generate` calls its function by itself."""
    module = importlib.import_module("fairseq_cli.generate")
    original = module.main

    @functools.wraps(original)
    def main(cfg: Any) -> Any:
        with one_line_for_mistakes():
            if isinstance(cfg, argparse.Namespace):
                cfg = convert_namespace_to_omegaconf(cfg)
            check_generation(cfg)
            return original(cfg)

    vars(module)["main"] = main


def _wrap_hydra() -> None:
    """Let hydra end with the one line too, and not with a traceback of its own before it.

    hydra keeps what a job raised and raises it again when its result is asked for. Versions
    before 1.1 do not, and are left as they are.
    """
    original = getattr(hydra_utils.JobReturn, "return_value", None)
    if not isinstance(original, property) or original.fget is None:
        return
    get = original.fget

    def return_value(self: Any) -> Any:
        error = self._return_value
        failed = self.status == hydra_utils.JobStatus.FAILED
        line = line_of(error) if failed else None
        if line is None:
            return get(self)
        # hydra catches every Exception and prints a traceback. This is none.
        raise SystemExit(line) from error

    result = original.getter(return_value)
    hydra_utils.JobReturn.return_value = result  # type: ignore[method-assign, assignment]


end_in_one_line()
