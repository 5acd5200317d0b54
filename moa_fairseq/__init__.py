"""Mixture of Attention Heads (arXiv 2210.05144) for fairseq.

This folder is both the `--user-dir` of fairseq's commands and the installed package. Importing
it registers the models and criterions; a second import does nothing.
"""

# isort: off
from . import compat  # noqa: F401  (first: it says what to install where fairseq is missing)
from . import criterions, load_heat_maps, mistakes, models, resuming  # noqa: F401
from . import router_watch, saving, sharding, workers  # noqa: F401

__version__ = "0.1.0"
