"""The table of wrong uses of what there is for masked language models."""

from __future__ import annotations

from .wrong_uses import USAGE, rows

PREPARE = rows(
    "moa-prepare-wikitext103",
    ("--recipe bpe", "invalid choice: 'bpe'", USAGE),
    ("--from-dir {texts}/none", "none: no such folder", "give another"),
    ("--from-dir {texts}", "nor a text of train", "leave --from-dir out to download"),
    ("--from-dir {masked}", "has no encoder.json", "use --recipe sentencepiece"),
    ("--recipe sentencepiece --vocab-size 0", "--vocab-size 0", "at least 1"),
    ("--vocab-size 99", "--vocab-size 99: --recipe gpt2 learns nothing", "leave it out"),
    ("--character-coverage 0.9", "--character-coverage 0.9: --recipe gpt2", "leave it out"),
    (
        "--recipe sentencepiece --character-coverage 1.1",
        "--character-coverage 1.1",
        "at most 1",
    ),
    ("--workers 0", "--workers 0", "at least 1"),
    ("--shard-lines 0", "--shard-lines 0", "at least 1"),
    ("--from-dir {masked} --recipe sentencepiece --vocab-size 9999", "9999", "lower it"),
    ("--checksums {texts}/two", "line 1 is not of the form", "sha256sum"),
    ("--base-url nowhere", "nowhere/wikitext-103-raw-v1.zip", "another address"),
    ("--archive x", "unrecognized arguments: --archive", USAGE),
)

PERPLEXITY = rows(
    "moa-masked-perplexity",
    ("", "required: --path", USAGE),
    ("--path {runs}/none.pt", "none.pt: no such checkpoint", "give one that"),
    ("--path {texts}/good.en", "is damaged", "use another checkpoint"),
    ("--path {moa}", "trained for the task translation, not masked_lm", "give a masked language"),
    ("--path {masked_moa} --subset dev", "has no split dev", "name another"),
    ("--path {masked_moa} --mask-prob 1", "--mask-prob 1.0", "between 0 and 1"),
    ("--path {masked_moa} --mask-prob some", "invalid float value: 'some'", USAGE),
    ("--path {masked_moa} --random-token-prob 0.95", "more than 1 together", "lower one"),
    ("--path {masked_moa} --leave-unmasked-prob -1", "--leave-unmasked-prob -1.0", "between 0"),
    ("--path {masked_moa} --seed -1", "--seed -1", "must not be negative"),
    ("--path {masked_moa} --max-tokens 0", "--max-tokens 0", "at least 1"),
    ("--path {masked_moa} --resamples 1", "--resamples 1", "at least 2"),
    ("--path {masked_moa} --baseline {texts}/none", "No such file", "give the path"),
    ("--path {masked_moa} --baseline {texts}/two", "is no PREFIX.blocks.tsv", "give one"),
)
PERPLEXITY += rows(
    "moa-masked-perplexity on",
    ("{data} --path {masked_moa}", "has no dictionary dict.txt", "--only-source"),
    ("{masked}/other --path {masked_moa}", "its vocabulary has", "that it was trained with"),
)

TRAIN = rows(
    "fairseq-train a masked model",
    ("--mask-prob 0", "--mask-prob 0.0", "between 0 and 1"),
    ("--mask-prob nan", "--mask-prob nan", "between 0 and 1"),
    ("--leave-unmasked-prob 0.6 --random-token-prob 0.6", "more than 1 together", "lower one"),
    ("--tokens-per-sample 1", "--tokens-per-sample 1", "at least 2"),
    ("--tokens-per-sample 3 --sample-break-mode eos", "--tokens-per-sample", "raise them"),
    ("--sample-break-mode lines", "invalid choice: 'lines'", USAGE),
    ("--mask-multiple-length 0", "--mask-multiple-length 0", "at least 1"),
    ("--mask-stdev -1", "--mask-stdev -1", "must not be negative"),
    ("--mask-whole-words", "--mask-whole-words: this build of fairseq", "leave it out"),
    ("--max-positions 10", "is more than --max-positions 10", "lower the one"),
    ("--positions rotary", "invalid choice: 'rotary'", USAGE),
    ("--num-experts 2", "--num-experts 2 is fewer than --encoder-attention-heads 4", "raise the"),
    ("--head-dim 0", "--head-dim 0", "at least 1"),
    ("--pooler-dropout 2", "--pooler-dropout 2.0", "between 0 and 1"),
    ("--moa-modules cross", "unrecognized arguments: --moa-modules", USAGE),
    ("--router-z-weight -1", "--router-z-weight -1", "0 turns the loss off"),
    ("--valid-subset dev", "has no split dev", "name another"),
    ("--save-dir {runs}/masked --positions none", "--positions learned", "choose another"),
)
TRAIN += rows(
    "fairseq-train a masked model on",
    ("{data}", "has no dictionary dict.txt", "scripts/prepare_wikitext103.sh"),
    ("{texts}/none", "none has no dictionary", "--only-source"),
)

SCRIPTS = [
    *rows(
        "prepare_wikitext103.sh",
        ("", "needs --out", "see --help"),
        ("--out {out}", "was not made by this script and would be replaced", "choose another"),
    ),
    *rows(
        "train_masked_lm.sh",
        ("", "needs --data DIR and --save-dir DIR", "see --help"),
        ("--data {data} --save-dir {out}/run", "holds no dict.txt", "make it with"),
        ("--data {masked} --save-dir {masked}", "are the same folder", "--save-dir and --data"),
        ("--data {masked} --save-dir {out}/run --model 8K", "--model 8K", "such as 8K8E128D"),
        ("--data {masked} --save-dir {out}/run --gpus 0", "--gpus 0", "from 1 on"),
        ("--data {masked} --save-dir {out}/run --gpus 999", "torch sees", "lower it"),
        ("--data {masked} --save-dir {out}/run --gpus 3 --dry-run", "--gpus 3", "a power of two"),
        ("--mdoel 8K8E128D", "unknown option --mdoel", "go after --"),
        ("--data", "the last option needs a value", "needs a value"),
    ),
    *rows(
        "evaluate_masked_lm.sh",
        ("", "needs --prepared DIR", "see --help"),
        ("--prepared {texts} --save-dir {out} --out {out}", "was not made by", "not to the end"),
        ("--prepared {prepared} --save-dir {out} --out {out}", "was not made by", "prepare_wiki"),
        ("--avreage 4", "unknown option --avreage", "go after --"),
    ),
    *rows(
        "evaluate_masked_lm.sh on prepared data",
        ("--subset dev", "--subset dev is not in", "give valid or test"),
        ("--average 0", "--average 0", "a whole number from 1 on"),
        ("--baseline {texts}", "holds no test.blocks.tsv", "another evaluation"),
        ("--save-dir {runs}/other-data", "trained on other data", "choose another folder"),
        ("--save-dir {texts}", "has no checkpoint_best.pt", "train first"),
    ),
]

WRONG_USES_OF_MASKED_LM = [*PREPARE, *PERPLEXITY, *TRAIN, *SCRIPTS]
