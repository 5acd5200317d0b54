"""Time and memory of one attention module against E, K, length and batch, as a page with plots."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Optional, Sequence

from ..analysis.benchmark import Plan, conditions, parse_model
from ..analysis.benchmark_subject import Setting
from ..analysis.growth import SWEEPS, measure, page, plot
from ..analysis.plots import require_matplotlib
from ..errors import UsageError
from ..text.files import write_lines
from .benchmark import add_conditions, check_device
from .common import command

logger = logging.getLogger("benchmark")


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    names = [sweep.name for sweep in SWEEPS]
    parser = argparse.ArgumentParser(prog="benchmark_growth.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for page, plots and JSON")
    parser.add_argument("--sweeps", nargs="+", choices=names, default=names)
    add_conditions(parser)
    args = parser.parse_args(arguments)
    for flag in ("repeats", "threads"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag} {getattr(args, flag)}: it must be at least 1")
    check_device(args)
    require_matplotlib("a page with plots")
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(device=args.device, precision=args.precision, vocab_size=100)
    models = (parse_model("stock"),)
    plan = Plan(models, ("module",), (1,), args.repeats, args.threads, setting)
    results = {}
    for sweep in SWEEPS:
        if sweep.name in args.sweeps:
            results[sweep.name] = measure(sweep, plan, logger.info)
            plot(sweep, results[sweep.name], args.out / f"{sweep.name}.png")
    seen = conditions(plan)
    rounds = {
        name: [
            {**point._asdict(), "milliseconds": point.milliseconds._asdict()} for point in points
        ]
        for name, points in results.items()
    }
    write_lines(
        args.out / "growth.json", [json.dumps({"conditions": seen, "points": rounds}, indent=2)]
    )
    given = [f"--device {args.device}"] if args.device != "cpu" else []
    given += [f"--precision {args.precision}"] if args.precision != "float32" else []
    text = " ".join(["python scripts/benchmark_growth.py", *given, f"--out {args.out}"])
    write_lines(args.out / "README.md", [page(results, seen, text)])
    print(args.out / "README.md")
