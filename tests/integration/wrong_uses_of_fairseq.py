"""The table of wrong uses of fairseq's commands with this package's models and options."""

from __future__ import annotations

from .wrong_uses import USAGE, rows

OPTIONS = rows(
    "fairseq-train",
    # MoA's own options, out of range.
    ("--num-experts 0", "--num-experts 0", "at least 1"),
    ("--num-experts 2", "--num-experts 2 is fewer than --encoder-attention-heads 4", "raise the"),
    ("--decoder-attention-heads 9", "than --decoder-attention-heads 9", "lower the other"),
    ("--encoder-attention-heads 0", "--encoder-attention-heads 0", "at least 1"),
    ("--head-dim 0", "--head-dim 0", "at least 1"),
    ("--heads-per-expert 0", "--heads-per-expert 0", "at least 1"),
    ("--gate-normalization sum", "invalid choice: 'sum'", USAGE),
    ("--sample-topk 7", "--sample-topk 7", "between 0 and --encoder-attention-heads 4"),
    ("--sample-topk -1", "--sample-topk -1", "between 0 and"),
    ("--router-init-std 0", "--router-init-std 0", "the default is 0.02"),
    ("--router-init-std nan", "--router-init-std nan", "must be positive"),
    ("--output-init-gain -1", "--output-init-gain -1", "the default is 0.4"),
    ("--moa-modules self", "--moa-modules 'self'", "one or more of encoder-self"),
    ("--moa-modules ''", "--moa-modules ''", "for none of them use --arch transformer"),
    ("--ffn-type dense", "invalid choice: 'dense'", USAGE),
    ("--ffn-num-experts 0", "--ffn-num-experts 0", "between 1 and"),
    ("--ffn-num-selected 0", "--ffn-num-selected 0", "between 1 and"),
    ("--ffn-num-selected 9", "--ffn-num-selected 9", "between 1 and --ffn-num-experts 8"),
    ("--load-balance-weight -1", "--load-balance-weight -1", "0 turns the loss off"),
    ("--router-z-weight -1", "--router-z-weight -1", "0 turns the loss off"),
    ("--load-cv-squared-weight nan", "--load-cv-squared-weight nan", "0 turns the loss off"),
    ("--num-experts eight", "invalid int value: 'eight'", USAGE),
    ("--num-expertz 2", "unrecognized arguments: --num-expertz", USAGE),
    # What contradicts another option.
    ("--num-experts 8 --num-expert 9", "--num-experts 8 and --num-expert 9", "give one of them"),
    ("--router-noise --gating normal", "--router-noise and --gating normal", "give one of them"),
    ("--load-heat-map-interval -5", "--load-heat-map-interval -5", "0 draws none"),
    ("--load-heat-map-interval 5 --no-save", "there is no place to draw to", "give --tensorboard"),
    ("--zloss 1 --router-z-weight 2", "two spellings of one option", "give one of them"),
    ("--switchloss 1 --load-balance-weight 2", "two spellings of one option", "give one of them"),
    ("--cvloss 1 --load-cv-squared-weight 2", "two spellings of one option", "give one of them"),
    ("--ffd-type moe --ffn-type normal", "two spellings of one option", "give one of them"),
    ("--encoder-layers-to-keep 0,4", "--encoder-layers-to-keep 0,4", "numbers from 0 to 0"),
    ("--decoder-xformers-att-config '{{}}'", "--decoder-xformers-att-config", "leave it out"),
    ("--ddp-backend fully_sharded", "--ddp-backend fully_sharded", "use --ddp-backend"),
    ("--checkpoint-activations --quant-noise-pq 0.1", "other noise and other experts", "leave"),
    ("--decoder-output-dim 32", "--decoder-output-dim 32", "share no embeddings"),
    ("--decoder-embed-dim 32", "--share-all-embeddings needs one size", "make them equal"),
    (
        "--moa-modules cross --encoder-attention-heads 3",
        "--encoder-attention-heads 3 does not divide --encoder-embed-dim 64",
        "choose a divisor",
    ),
    (
        "--quant-noise-pq 0.1 --quant-noise-pq-block-size 7",
        "--quant-noise-pq-block-size 7 does not divide",
        "choose a divisor",
    ),
    # fairseq's, on which it would stumble later or not at all.
    ("--dropout 1.5", "--dropout 1.5", "between 0 and 1"),
    ("--decoder-layerdrop -0.1", "--decoder-layerdrop -0.1", "between 0 and 1"),
    ("--encoder-layers -1", "--encoder-layers -1", "at least 0"),
    ("--encoder-ffn-embed-dim 0", "--encoder-ffn-embed-dim 0", "at least 1"),
    ("--bf16", "--bf16 and --tpu ask fairseq for a TPU", "common.bf16=true"),
    ("--update-freq 0", "--update-freq 0", "at least 1"),
    ("--max-tokens 0", "--max-tokens 0", "at least 1"),
    ("--max-tokens 3", "--max-tokens 3: a sentence is longer", "raise it"),
    ("--max-source-positions 1", "no training pair is left", "raise them"),
    ("--arch moa", "invalid choice: 'moa'", USAGE),
    ("--criterion moa", "invalid choice: 'moa'", USAGE),
    ("--lr fast", "argument --lr: invalid", USAGE),
)

DATA = [
    *rows(
        "fairseq-train",
        ("--valid-subset dev", "has no split dev", "binarise one with fairseq-preprocess"),
        ("--source-lang en --target-lang xx", "no dictionary of language xx", "--target-lang"),
        ("--encoder-embed-path {texts}/none", "none: No such file", "give another path"),
        ("--save-dir {out}/file", "Not a directory", "choose a place"),
        ("--finetune-from-model {runs}/none.pt", "no such checkpoint", "give one that"),
        ("--finetune-from-model {dense}", "the checkpoint is not of this model", "train with"),
        # Resuming from {runs}/moa, which stays as it is.
        ("--save-dir {runs}/moa --num-experts 16", "--num-experts 8, and this run has", "give"),
        ("--save-dir {runs}/moa --encoder-layers 2", "is not of this model", "train with the"),
        ("--save-dir {runs}/dense", "but of --arch dense_transformer", "choose another"),
        ("--restore-file {runs}/foreign.pt", "is not a fairseq checkpoint", "give a file that"),
    ),
    *rows(
        "fairseq-train on",
        ("{texts}/none", "none: No such file", "give another path"),
        ("{data}/../pieces", "holds no binarised text", "--destdir of fairseq-preprocess"),
        ("{datasets}/nodict", "has no dictionary of language de", "--destdir"),
        ("{datasets}/notrain", "has no split train", "binarise one"),
        ("{datasets}/novalid", "has no split valid", "--valid-subset"),
        ("{datasets}/empty", "a split of the data is empty", "binarise text"),
        (
            "{datasets}/otherdict --save-dir {runs}/moa",
            "its vocabulary has 40 types, and the dictionary here 42",
            "give the data that it was trained with",
        ),
        (
            "{datasets}/twodicts",
            "--share-all-embeddings requires a joined dictionary",
            "leave the option out",
        ),
    ),
    *rows(
        "fairseq-train without a batch size",
        ("", "neither --max-tokens nor --batch-size is given", "--max-tokens 4096"),
    ),
    *rows(
        "fairseq-train a dense model",
        ("--save-dir {runs}/moa", "but of --arch moa_transformer_tiny", "choose another"),
        ("--save-dir {runs}/dense --encoder-attention-heads 4", "--encoder-att", "give"),
        ("--save-dir {runs}/dense --decoder-layers 2", "is not of this model", "train with"),
        ("--encoder-attention-heads 3", "does not divide --encoder-embed-dim 64", "a divisor"),
        ("--arch transformer --save-dir {runs}/moa", "is not of this model", "another --save-dir"),
    ),
]

TRANSLATION = [
    *rows(
        "fairseq-generate",
        ("--path {runs}/none.pt", "none.pt: no such checkpoint", "give one that"),
        ("--path {moa} --gen-subset dev", "has no split dev", "--gen-subset"),
        ("--path {moa} --beam 0", "--beam 0", "at least 1"),
        ("--path {moa} --lenpen long", "invalid float value: 'long'", USAGE),
        ("--path {moa} --max-len-b 0", "--min-len is larger", "lower the one"),
        ("--path {moa} --bpe sentencepiece", "--sentencepiece-model is missing", "give it"),
        (
            "--path {moa} --bpe sentencepiece --sentencepiece-model {texts}/none",
            "none: no such file",
            "give the path",
        ),
        ("--path {moa} --source-lang fr --target-lang de", "language fr", "--source-lang"),
        ("--path {moa}:{runs}/foreign.pt", "is not a fairseq checkpoint", "give a file"),
        ("--path {moa} --results-path {out}/file", "Not a directory", "choose a place"),
        (
            "--path {moa} --model-overrides \"{{'num_experts': 2}}\"",
            "--num-experts 2 is fewer than",
            "raise the one",
        ),
        ("--path {moa} --model-overrides nothing", "--model-overrides", "for instance"),
        ("--path {moa} --sampling --nbest 2", "--sampling requires --nbest", "goes together"),
        ("--beams 4", "unrecognized arguments: --beams", USAGE),
        ("", "--path is missing", "give the checkpoint"),
    ),
    *rows(
        "fairseq-generate on",
        ("{texts}/none --path {moa}", "none: No such file", "give another path"),
        ("{datasets}/otherdict --path {moa}", "its vocabulary has 40", "give the data"),
        ("{datasets}/otherdict --path {dense}", "its vocabulary has 40", "give the data"),
    ),
    *rows(
        "fairseq-interactive",
        ("", "--path is missing", "give the checkpoint"),
        ("--path {runs}/none.pt", "no such checkpoint", "give one that"),
        ("--path {moa} --input {texts}/none", "none: No such file", "give another path"),
        ("--path {moa} --input {texts}/latin.de", "is not UTF-8 (byte 0xfc)", "iconv"),
        ("--path {moa} --batch-size 5", "--batch-size is larger than --buffer", "lower the one"),
        ("--path {moa} --bpe subword_nmt --bpe-codes {texts}/none", "none: no such", "the path"),
    ),
]

HYDRA = rows(
    "fairseq-hydra-train",
    ("+model.num_experts=2", "--num-experts 2 is fewer than", "raise the one or lower"),
    ("+model.num_experts=many", "num_experts: Value 'many'", "a value that fits"),
    ("+model.gate_normalization=sum", "Invalid value 'sum', expected one of", "a value that fits"),
    ("+model.num_expertz=2", "Key 'num_expertz' not in 'MoATransformerTinyConfig'", "spelling"),
    ("model._name=moa", "model._name is no model that a YAML can name", "moa_transformer"),
    ("+criterion.load_balance_weight=-1", "--load-balance-weight -1", "0 turns the loss off"),
    ("criterion._name=moa", "'moa' is no known _name", "mend its spelling"),
    ("task._name=moa", "task._name is no known task", "such as translation"),
    ("task.data={texts}/none", "none: No such file", "give another path"),
    ("task.data={datasets}/nodict", "has no dictionary of language de", "--destdir"),
    ("+dataset.max_tokenz=2", "dataset.max_tokenz: fairseq has no such", "did you mean max_tok"),
    ("+optimiser.lr=2", "optimiser: fairseq has no such option", "did you mean optimizer?"),
    ("dataset.max_tokens=null", "neither --max-tokens nor --batch-size", "give one"),
    ("optimization.update_freq=[0]", "--update-freq 0", "at least 1"),
    ("checkpoint.save_dir={runs}/dense", "but of --arch dense_transformer", "choose another"),
    ("--config-dir {yaml} --config-name model_key", "Key 'num_expertz' not in", "its spelling"),
    ("--config-dir {yaml} --config-name optimizer_key", "Key 'adam_betaz' not in", "its spelling"),
)

# What hydra refuses before it starts fairseq, and so before this package is loaded: several lines
# of its own, no traceback.
HYDRA_ITSELF = rows(
    "hydra",
    ("model.num_expertz=2", "Key 'num_expertz' is not in struct", "use +model.num_expertz=2"),
    ("common.seeds=1", "Key 'seeds' not in 'CommonConfig'", "use +common.seeds=1"),
    ("common.seed=x", "'x' of type 'str' could not be converted to Integer", "common.seed"),
    ("--config-dir {texts}/none --config-name x", "none' not found", "Additional config directory"),
    ("--config-dir {yaml} --config-name dataset_key", "Key 'max_tokenz' not in", "dataset.max_tok"),
    ("--config-dir {yaml} --config-name section", "Key 'extra' not in 'FairseqConfig'", "extra"),
)

WRONG_USES_OF_FAIRSEQ = [*OPTIONS, *DATA, *TRANSLATION, *HYDRA]
