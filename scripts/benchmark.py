#!/usr/bin/env python3
"""Speed and memory of models side by side: see `moa_fairseq/analysis/benchmark.py`."""

from moa_fairseq.cli.benchmark import main

if __name__ == "__main__":
    main()
