#!/usr/bin/env python3
"""How one attention module grows: see `moa_fairseq/analysis/growth.py`."""

from moa_fairseq.cli.benchmark_growth import main

if __name__ == "__main__":
    main()
