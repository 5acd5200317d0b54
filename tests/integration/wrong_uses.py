"""The table of wrong uses of this package's commands and scripts; fairseq's are in the next one.

Every row ends with a non-zero status and one line, which names the cause and the remedy.
"""

from __future__ import annotations

from typing import NamedTuple

# Where argparse refuses a value, the line names it, and the remedy is the usage before it.
USAGE = "usage: "


class WrongUse(NamedTuple):
    """One row.

    Attributes:
        command: what runs; `COMMANDS` in test_wrong_uses.py says how, and with which arguments.
        arguments: what comes after those, as in a shell. {texts}, {data}, {runs}, {out}, …
            are folders of the fixture `ground`.
        cause, remedy: parts of the last line.
    """

    command: str
    arguments: str
    cause: str
    remedy: str


def rows(command: str, *uses: tuple[str, str, str]) -> list[WrongUse]:
    return [WrongUse(command, *use) for use in uses]


BENCHMARK = rows(
    "benchmark.py",
    ("--models fast", "model 'fast'", "a MoA such as 8K32E128D"),
    ("--models stock stock", "a name stands twice", "a name of its own"),
    ("--models x='--encoder-layers 3'", "model 'x=", "NAME='--arch ARCH OPTIONS'"),
    ("--measures speed", "invalid choice: 'speed'", USAGE),
    ("--repeats 0", "--repeats 0", "at least 1"),
    ("--compile", "--compile", "leave generate out of --measures"),
    ("--tokens -5", "--tokens -5", "at least 1"),
    ("--batch-sizes 8 0", "--batch-sizes", "at least 1"),
    ("--device cuda", "--device cuda: torch sees no GPU", "use --device cpu"),
    ("--json {out}/none/x.json", "its folder does not exist", "make it first"),
    ("--models stock 8K4E16D", "8K4E16D: --num-experts 4 is fewer", "raise the one"),
)
GROWTH = rows(
    "benchmark_growth.py",
    ("", "required: --out", USAGE),
    ("--out {out}/growth --sweeps width", "invalid choice: 'width'", USAGE),
    ("--out {out}/growth --repeats 0", "--repeats 0", "at least 1"),
    ("--out {out}/growth --device cuda", "--device cuda: torch sees no GPU", "use --device cpu"),
)
HEAD_REPORT = rows(
    "moa-head-report",
    ("{data}", "required: --path", USAGE),
    ("--path {moa}", "required: DATA", USAGE),
    ("{data} --path {runs}/none.pt", "none.pt: no such checkpoint", "give one that"),
    ("{data} --path {runs}/moa", "moa: no such checkpoint", "give one that"),
    ("{data} --path {dense}", "has no routed experts", "with MoA modules"),
    ("{data} --path {runs}/foreign.pt", "is not a fairseq checkpoint", "give a file that"),
    ("{data} --path {texts}/good.en", "is damaged", "use another checkpoint"),
    ("{data} --path {moa} --path {moa}", "is given twice", "each of them once"),
    ("{data} --path {moa} --subset dev", "--subset dev", "binarise one"),
    ("{out}/none --path {moa}", "none: no such folder of data", "--destdir"),
    ("{datasets}/nodict --path {moa}", "has no dictionary of language de", "--destdir"),
    ("{datasets}/otherdict --path {moa}", "its vocabulary has", "give the data that"),
    ("{data} --path {moa} --out {out}/file", "Not a directory", "choose another"),
    ("{data} --path {moa} --out {out}/data", "holds precious", "choose a new folder"),
    ("{data} --path {moa} --max-tokens 0", "--max-tokens 0", "at least 1"),
    ("{data} --path {moa} --max-tokens 2", "--max-tokens 2: a sentence is longer", "raise it"),
    ("{data} --path {moa} --batch-size 0", "--batch-size 0", "at least 1"),
    ("{data} --path {moa} --num-sentences -1", "--num-sentences -1", "at least 1"),
    ("{data} --path {moa} --min-count 0", "--min-count 0", "at least 1"),
    ("{data} --path {moa} --top 0", "--top 0", "at least 1"),
    ("{data} --path {moa} --max-words 0", "--max-words 0", "at least 1"),
    ("{data} --path {moa} --post-process letter", "invalid choice: 'letter'", USAGE),
    ("{data} --path {moa} --seed many", "invalid int value: 'many'", USAGE),
    ("{data} --path {moa} --sentence 'a b'", "--sentence needs --bpe sentencepiece", "give both"),
    ("{data} --path {moa} --sentence ' ' ", "--sentence is empty", "leave the option out"),
    ("{data} --path {moa} --sentence-maps all", "--sentence is missing", "give it, or none"),
    ("{data} --path {moa} --bpe sentencepiece", "needs --sentencepiece-model FILE", "give the one"),
    ("{data} --path {moa} --bpe-codes x", "--bpe-codes x", "give that too"),
    (
        "{data} --path {moa} --bpe subword_nmt --bpe-codes {out}/none",
        "no such file",
        "give the one",
    ),
    ("{data} --path {moa} --importance 1", "--importance 1", "at least 2"),
    ("{data} --path {moa} --importance-resamples 200", "goes with --importance N", "give that too"),
    ("{data} --path {moa} --importance 9 --beam 0", "--beam 0", "at least 1"),
)
PREPARE = rows(
    "moa-prepare",
    ("--train {texts}/missing", "missing.en: no such file", "name PREFIX.LANGUAGE"),
    ("--train {texts}/short", "has 2 lines but", "line n of the one must translate"),
    ("--train {texts}/empty", "is empty", "one sentence a line"),
    ("--train {texts}/latin", "line 1 is not UTF-8 (byte 0xfc)", "iconv -f LATIN1 -t UTF-8"),
    ("--train {texts}/good --vocab-size 999999", "--vocab-size 999999", "lower it"),
    ("--train {texts}/good --vocab-size many", "invalid int value: 'many'", USAGE),
    ("--train {texts}/good --vocab-size -1", "--vocab-size -1", "at least 1"),
    ("--train {texts}/good --max-length 0", "--max-length 0", "at least 1"),
    ("--train {texts}/good --max-ratio 0.5", "--max-ratio 0.5", "at least 1"),
    ("--train {texts}/good --max-ratio nan", "--max-ratio nan", "at least 1"),
    (
        "--train {texts}/good --vocab-size 60 --max-length 1",
        "no training pair is left",
        "raise --max-length",
    ),
    ("--train {texts}/good --valid {texts}/none", "none.en: no such file", "--valid"),
    ("--train {texts}/good --valid {texts}/short", "has 2 lines but", "must translate"),
    ("--train {texts}/good --test {texts}/latin", "line 1 is not UTF-8", "iconv"),
    ("--train {texts}/good --hold-out 5000", "are too few to hold out 5000", "lower --hold-out"),
    ("--train {texts}/good --hold-out 0", "--hold-out 0", "at least 1"),
    ("--train-source {texts}/good.en", "both --train-source and --train-target", "give either"),
    (
        "--train {texts}/good --train-source {texts}/good.en --train-target {texts}/good.de",
        "--train PREFIX or both",
        "give either",
    ),
    ("", "--train PREFIX or both", "give either"),
    ("--trian {texts}/good", "unrecognized arguments: --trian", USAGE),
    ("--train {texts}/good --source-lang de", "are both de", "different names"),
    ("--train {texts}/good --target-lang zh-CN", "--target-lang zh-CN", "such as zh_CN"),
    ("--train {texts}/good --target-lang ../x", "--target-lang ../x", "letters, digits"),
    ("--train {texts}/good --out {out}/file", "Not a directory", "choose a place"),
    ("--train {out}/prepared/raw/train", "lies in a folder that --out", "choose another"),
)

AVERAGE = rows(
    "moa-average-checkpoints",
    ("--inputs {runs}/none.pt", "none.pt: no such checkpoint", "give one that"),
    ("--inputs {runs}/moa", "is a folder: say how many", "--num-epoch-checkpoints 5"),
    ("--inputs {runs}/moa --num-epoch-checkpoints 9", "9 were asked for", "lower that number"),
    ("--inputs {runs}/moa --num-update-checkpoints 9", "9 were asked for", "--save-interval-up"),
    ("--inputs {runs}/moa --num-best-checkpoints 2", "2 were asked for", "--keep-best-check"),
    ("--inputs {runs}/moa --num-epoch-checkpoints 0", "number of checkpoints", "at least 1"),
    ("--inputs {runs}/none --num-epoch-checkpoints 1", "no such folder", "give a --save-dir"),
    ("--inputs {runs}/moa {runs} --num-epoch-checkpoints 1", "--inputs must be one", "give one"),
    ("--inputs {moa} --checkpoint-upper-bound 3", "--checkpoint-upper-bound needs", "--num-epoch"),
    ("--inputs {moa} {dense}", "is not of the same model as", "checkpoints of one run"),
    ("--inputs {moa} {runs}/foreign.pt", "is not a fairseq checkpoint", "give another"),
    ("--inputs {moa} {texts}/good.en", "is damaged", "use another checkpoint"),
    ("--inputs {moa} --output {moa}", "is one of the inputs", "choose another name"),
    (
        "--inputs {runs}/moa --num-epoch-checkpoints 1 --num-best-checkpoints 1",
        "not allowed with argument",
        USAGE,
    ),
)

IMPORT = rows(
    "moa-import-official",
    ("{runs}/none.pt {out}/new.pt", "none.pt: no such checkpoint", "give one that"),
    ("{moa} {out}/new.pt", "is a checkpoint of moa_fairseq already", "use it as it is"),
    ("{dense} {out}/new.pt", "it has no router", "needs no import"),
    ("{moa} {out}/average.pt", "exists already", "choose another name"),
    ("{texts}/good.en {out}/new.pt", "is damaged", "use another checkpoint"),
)

_SCORED = "--hypotheses {texts}/two --reference {texts}/two "
SCORE = rows(
    "moa-score",
    (
        "--hypotheses {texts}/two --reference {texts}/three",
        "2 hypotheses but 3 references",
        "give the whole set",
    ),
    ("--hypotheses {texts}/none --reference {texts}/two", "No such file", "give the path"),
    ("--hypotheses {texts}/empty.en --reference {texts}/two", "is empty", "one sentence a line"),
    ("--hypotheses {texts}/latin.de --reference {texts}/two", "is not UTF-8", "iconv"),
    ("--hypotheses {texts}/two", "required: --reference", USAGE),
    (_SCORED + "--generate-output {texts}/two", "not allowed with argument", USAGE),
    (_SCORED + "--samples -1", "--samples -1", "0 prints none"),
    (_SCORED + "--resamples 1", "--resamples 1", "give 2 or more"),
    (_SCORED + "--seed 0", "--seed 0", "at least 1"),
    (_SCORED + "--baseline {texts}/two --resamples 0", "needs resamples", "raise it"),
    (_SCORED + "--baseline {texts}/three", "3 hypotheses but 2 references", "the whole set"),
    (_SCORED + "--setting beam", "--setting beam", "such as beam=4"),
    (_SCORED + "--language-pair english", "--language-pair english", "such as en-de"),
    (_SCORED + "--tokenised-reference {texts}/two", "needs --language-pair", "such as en-de"),
    (_SCORED + "--comet some-model", "--comet some-model", "needs --source FILE"),
    (_SCORED + "--source {texts}/three", "three has 3 lines but", "must translate"),
    (
        "--hypotheses {texts}/pieces --reference {texts}/two",
        "hold subword marks (line 1, 2)",
        "--bpe sentencepiece",
    ),
    (
        "--hypotheses {texts}/tokenised --reference {texts}/two",
        "100% of the lines with punctuation look tokenised",
        "generate with --tokenizer moses",
    ),
    (
        "--generate-output {texts}/two --reference {texts}/two",
        "has no D- lines",
        "must be the output of fairseq-generate",
    ),
    (
        "--generate-output {texts}/incomplete --reference {texts}/two",
        "1 of 2 sentences are missing",
        "generate again",
    ),
    (
        "--hypotheses {out}/report.txt --reference {out}/report.txt",
        "would overwrite",
        "choose another",
    ),
)

OTHER_COMMANDS = [
    *rows(
        "moa-profile",
        ("--arch lstm", "--arch lstm is not a translation Transformer", "moa_transformer"),
        ("--vocab-size 0", "--vocab-size 0", "at least 1"),
        ("--length 0", "--length 0", "at least 1"),
        ("--num-experts 2", "--num-experts 2 is fewer than", "raise the one or lower"),
        ("--dropout 3", "--dropout 3.0", "between 0 and 1"),
        ("--num-expertz 9", "unrecognized arguments: --num-expertz", USAGE),
    ),
    *rows("moa-user-dir", ("--here", "unrecognized arguments: --here", USAGE)),
    *rows(
        "interface_texts",
        ("{texts}/two", "is not a readable wheel", "download it again"),
        ("{texts}/empty.whl", "holds no texts for en-de", "give a wheel of homeassistant"),
    ),
    *rows(
        "wmt14_miniature",
        ("--train-lines 0", "--train-lines 0", "at least 1"),
        ("--text {texts}/none", "No such file", "give the path"),
    ),
    *rows("wmt14_estimate", ("--size huge", "--size huge", "base")),
]

PREPARE_WMT14 = rows(
    "moa-prepare-wmt14",
    ("--from-dir {archives} --pair en-xx", "invalid choice: 'en-xx'", USAGE),
    ("--from-dir {archives} --recipe moses", "invalid choice: 'moses'", USAGE),
    ("--from-dir {archives}/none", "none: no such folder", "--from-dir"),
    ("--from-dir {texts}", "has neither training-parallel-europarl-v7.tgz nor", "put one there"),
    ("--from-dir {archives} --workers 0", "--workers 0", "at least 1"),
    ("--from-dir {archives} --shard-lines -1", "--shard-lines -1", "at least 1"),
    ("--from-dir {archives} --vocab-size 0", "--vocab-size 0", "at least 1"),
    ("--from-dir {archives} --vocab-size 9", "--vocab-size 9", "lower it"),
    ("--from-dir {archives} --checksums {texts}/none", "none: No such file", "give another file"),
    ("--from-dir {archives} --checksums {texts}/two", "line 1 is not of the form", "sha256sum"),
    ("--from-dir {archives} --checksums {texts}/latin.de", "is not UTF-8", "sha256sum printed"),
    ("--from-dir {archives} --checksums {archives}/few", "does not name", "add its line"),
    (
        "--from-dir {archives}/changed --checksums {archives}/changed/SHA256SUMS",
        "test-full.tgz is not the expected file",
        "put the whole file there, or name the digests",
    ),
    (
        "--from-dir {archives}/page --checksums {archives}/SHA256SUMS",
        "is a web page, not an archive",
        "or put the archive there",
    ),
    ("--base-url nowhere", "nowhere/training-parallel-europarl-v7.tgz", "another address"),
    ("--archives {archives}", "unrecognized arguments: --archives", USAGE),
)

TRAIN_WMT14 = rows(
    "wmt14_train_command",
    ("--pair en-ru", "argument --pair: invalid choice: 'en-ru'", USAGE),
    ("--pair en-fr", "--pair en-fr: --prepared", "holds en-de"),
    ("--size huge", "argument --size: invalid choice: 'huge'", USAGE),
    ("--model lstm", "argument --model: invalid choice: 'lstm'", USAGE),
    ("--gpus two", "argument --gpus: invalid int value: 'two'", USAGE),
    ("--gpus 0", "--gpus 0", "give a number from 1 on"),
    ("--gpus 999", "--gpus 999: torch sees", "lower it, or leave it out"),
    ("--gpus 3 --dry-run", "3 workers", "use 2 or 4 workers"),
    ("--gpus 2 --nodes 2 --dry-run", "--nodes 2 needs --master", "the address of the first"),
    ("--nodes 0", "--nodes 0", "give a number from 1 on"),
    ("--node-rank 1", "--node-rank 1", "between 0 and"),
    ("--max-tokens 5000", "--max-tokens 5000", "use 4096 or 8192"),
    ("--max-tokens", "argument --max-tokens: expected one argument", USAGE),
    ("--save-dir", "argument --save-dir: expected one argument", USAGE),
    ("--max_tokens 4096", "unrecognized arguments: --max_tokens", USAGE),
    ("--precision fp16", "--precision fp16 needs a GPU", "use fp32"),
    ("--prepared {texts}/none", "it holds no manifest.json", "run scripts/prepare_wmt14.sh"),
    ("-- --max-tokens 4096", "--max-tokens after -- changes the 262,144 tokens", "give it before"),
    ("-- --max-tokens=4096", "--max-tokens after -- changes the 262,144 tokens", "give it before"),
)

_POINTS = "--num-experts 4 --heads 2 --head-dim 8 "
SWEEP = [
    *rows(
        "sweep",
        ("--num-experts 4,many", "--num-experts 4,many", "whole numbers from 1 on"),
        ("--heads 0", "--heads 0", "whole numbers from 1 on"),
        ("--head-dim ''", "--head-dim", "whole numbers from 1 on"),
        ("--seeds -1", "--seeds -1", "whole numbers from 1 on"),
        ("--heads 64", "every K is more than every E", "raise the one or lower the other"),
        ("--dense 0", "--dense 0", "at least 1"),
        ("--average 0", "--average 0", "at least 1"),
        (_POINTS + "--average 21", "--average 21: with optimization.max_epoch=20", "lower it"),
        (_POINTS + "--average 6", "--average 6: with checkpoint.keep_last_epochs=5", "lower it"),
        (_POINTS + "--jobs 0", "--jobs 0", "at least 1"),
        (_POINTS + "--dense 3", "3 does not divide --encoder-embed-dim", "choose a"),
        ("--bleu dev", "--bleu dev is not in", "give for instance valid"),
        ("--expert 4", "unrecognized arguments: --expert", USAGE),
        ("--prepared {texts}", "was not made by prepare.sh", "make it with"),
        ("-- --max-epoch 3", "--max-epoch after --", "hydra's form"),
        ("-- common.seed=3", "every point has its own common.seed", "leave it out"),
        (_POINTS + "-- optimization.max_epok=3", "max_epok", "mend the spelling"),
        (_POINTS + "-- +model.gate_normalization=most", "gate_normalization", "a value that fits"),
    ),
    *rows(
        "moa-sweep-report",
        ("", "required: DIR", USAGE),
        ("{texts}", "holds no sweep.json", "give the --out of sweep.sh"),
        ("{runs}/broken-sweep", "was not written by sweep.sh", "give the --out of a sweep"),
        ("{runs}/sweep --quality bleu", "no finished point has it", "--bleu valid"),
        ("{runs}/sweep --quality ppl", "invalid choice: 'ppl'", USAGE),
        ("{runs}/sweep --out {out}/file", "Not a directory", "choose a place"),
    ),
]

SCRIPTS = [
    *rows("sweep.sh", ("", "needs --prepared DIR and --out DIR", "see --help")),
    *rows(
        "prepare.sh",
        ("", "needs --source-lang", "see --help"),
        ("--out {out}/a,b", "takes no comma in a path", "--out"),
        ("--out {out}", "was not made by this script and would be replaced", "choose another"),
    ),
    *rows(
        "train.sh",
        ("", "needs --data DIR and --save-dir DIR", "see --help"),
        ("--data {texts} --save-dir {out}/run", "holds no dictionary", "make it with"),
        ("--dta {data}", "unknown option --dta", "go after --"),
        ("--data", "the last option needs a value", "needs a value"),
        ("--data {data} --save-dir {data}", "are the same folder", "--save-dir and --data"),
        ("--data {data} --save-dir {runs}/other-data", "trained on other data", "choose another"),
    ),
    *rows(
        "evaluate.sh",
        ("", "needs --prepared DIR", "see --help"),
        ("--prepared {texts} --save-dir {out} --out {out}", "was not made by", "prepare.sh"),
        ("--prepared {out}/broken --save-dir {out} --out {out}", "does not say", "prepare the"),
        ("--beem 4", "unknown option --beem", "go after --"),
    ),
    *rows(
        "evaluate.sh on prepared data",
        ("--beam four", "--beam four", "a whole number from 1 on"),
        ("--average 0", "--average 0", "a whole number from 1 on"),
        ("--lenpen long", "--lenpen long", "such as 0.6"),
        ("--samples -1", "--samples -1", "from 0 on"),
        ("--subset dev", "--subset dev is not in", "raw"),
        ("--baseline {texts}/none", "no file", "--baseline"),
        ("--save-dir {runs}/other-data", "trained on other data", "choose another folder"),
    ),
    *rows(
        "average_checkpoints.sh",
        ("", "needs the folder of the checkpoints", "see --help"),
        ("{runs}/moa 5 6", "unknown argument 6", "see --help"),
    ),
    *rows(
        "quickstart.sh",
        ("--pair en-xx", "--pair en-xx", "give --src and --tgt"),
        ("--pair english", "--pair english", "such as en-de"),
        ("--src {texts}/good.en", "--src and --tgt", "go together"),
        ("--src {texts}/none --tgt {texts}/good.de", "none: no such file", "your own text"),
        ("--epochs 0", "--epochs 0", "from 1 on"),
        ("--vocab-size many", "--vocab-size many", "from 1 on"),
        ("--out {out}/a,b", "takes no comma in a path", "--out"),
        ("--epoch 3", "unknown option --epoch", "see --help"),
    ),
    *rows("prepare_wmt14.sh", ("", "needs --pair and --out", "see --help")),
    *rows("train_wmt14.sh", ("", "needs --prepared", "see --help")),
    *rows(
        "reproduce_wmt14.sh",
        ("", "needs --pair and --size", "see --help"),
        ("--pair en-xx --size base", "--pair en-xx", "give en-de or en-fr"),
        ("--pair en-de --size huge", "--size huge", "give base or big"),
        ("--pair en-de --size base --model lstm", "--model lstm", "give moa_transformer"),
        ("--pair en-de --size base --recipe bpe", "--recipe bpe", "give sentencepiece"),
        ("--pair en-de --size base --smoke --from-dir .", "its own archives", "leave --from-dir"),
        ("--pair en-de --size base --smoke-text none", "--smoke-text none", "no such folder"),
        ("--pair en-de --size base --gpu 1", "unknown option --gpu", "see --help"),
    ),
    *rows("train_wmt14.slurm", ("--pair en-de", "submit it with sbatch", "see --help")),
]

WRONG_USES = [
    *(
        *BENCHMARK,
        *GROWTH,
        *HEAD_REPORT,
        *PREPARE,
        *AVERAGE,
        *IMPORT,
        *SCORE,
        *OTHER_COMMANDS,
        *PREPARE_WMT14,
        *TRAIN_WMT14,
        *SWEEP,
    ),
    *SCRIPTS,
]
