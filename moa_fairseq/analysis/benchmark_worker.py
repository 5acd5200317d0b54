"""A process that measures one model, a line of JSON for each request on its standard input."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any, Dict, List

import torch

from ..errors import UsageError
from .benchmark_subject import Setting, Subject
from .costs import count_parameters, linear_macs

#: Sides of the square matrices whose product gives the rate, and bytes that are copied.
MATRIX_SIDE = 2048
COPIED_BYTES = 2**28
#: Adam keeps a parameter, its gradient and two moments.
NUMBERS_PER_PARAMETER = 4
UPDATES_FOR_MEMORY = 3


def measure(subject: Subject, request: Dict[str, Any], resident: int) -> Dict[str, Any]:
    """Answer one request, `{"measure": …}`; seconds and tokens, or bytes."""
    kind = request["measure"]
    if kind == "train":
        seconds, tokens = subject.train()
    elif kind == "module":
        seconds, tokens = subject.module()
    elif kind == "generate":
        seconds, tokens = subject.generate(request["batch_size"])
    elif kind == "memory":
        for _ in range(UPDATES_FOR_MEMORY):
            subject.train()
        return {"bytes": peak_bytes(subject.setting) - resident}
    elif kind == "module memory":
        before = peak_bytes(subject.setting)
        subject.module()
        return {"bytes": peak_bytes(subject.setting) - before}
    elif kind == "facts":
        return facts(subject)
    else:
        raise ValueError(f"unknown measure {kind!r}")
    return {"seconds": seconds, "tokens": tokens}


def facts(subject: Subject) -> Dict[str, Any]:
    """What does not vary: costs of the model, and what the machine can do at best."""
    parameters = count_parameters(subject.model)
    width = 2 if subject.setting.precision == "bfloat16" else 4
    return {
        "parameters": parameters,
        "state_bytes": parameters * width * NUMBERS_PER_PARAMETER,
        "macs_per_token": linear_macs(subject.model, 1),
        "flops_per_second": subject.rate_of_products(MATRIX_SIDE),
        "bytes_per_second": subject.rate_of_copies(COPIED_BYTES),
    }


def peak_bytes(setting: Setting) -> int:
    """The most memory that this process has had: on the device, or resident on a CPU."""
    if setting.device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        # getrusage would begin with what the process that started this one had.
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:  # not Linux
        found = None
    if found is not None:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(arguments: List[str]) -> None:
    settings = json.loads(arguments[0])
    torch.set_num_threads(settings["threads"])
    # What fairseq prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        resident = peak_bytes(Setting(**settings["setting"]))
        subject = Subject(settings["words"], Setting(**settings["setting"]))
        for line in sys.stdin:
            print(
                json.dumps(measure(subject, json.loads(line), resident)), file=answers, flush=True
            )
    except UsageError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
