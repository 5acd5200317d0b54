#!/usr/bin/env bash
# Average, translate, score: sacreBLEU with its signature, and what else the data allows.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: evaluate.sh --prepared DIR --save-dir DIR --out DIR [--subset test] [--average N] [--beam N]
                   [--lenpen X] [--baseline FILE-or-DIR] [--comet MODEL] [--samples 0]
                   [-- options of fairseq-generate]

Averages the last checkpoints, translates a subset with beam search, and scores the detokenised
text against the raw references with sacreBLEU and chrF++, with 95 % bootstrap intervals. For the
WMT14 data of prepare_wmt14.sh it adds the paper's figure: Moses' multi-bleu of tokenised text,
compounds split for English-German only. Refuses an incomplete translation.

  --prepared DIR   what prepare.sh or prepare_wmt14.sh made (its --out)
  --save-dir DIR   checkpoints of the training run
  --out DIR        SUBSET.txt, SUBSET.md and SUBSET.json (scores and signatures),
                   SUBSET.hypotheses.txt, SUBSET.generate.txt (all that fairseq-generate printed)
  --subset NAME    valid, test, test1, … (default: test)
  --average N      epochs to average (default: the recipe's, in manifest.json; otherwise 5)
  --beam N         beam size (default: the recipe's; otherwise 5)
  --lenpen X       length penalty; above 1 favours longer output (default: the recipe's;
                   otherwise 1.0)
  --baseline PATH  another output for the same subset, tested against this one by paired
                   bootstrap: the --out of another evaluation, its SUBSET.hypotheses.txt or
                   SUBSET.generate.txt, or any file of detokenised lines
  --comet MODEL    add COMET, for instance by Unbabel/wmt22-comet-da, which is downloaded; needs
                   the package unbabel-comet
  --samples N      print N translations beside their references (default: 0)
HELP
}

prepared="" save_dir="" out="" subset="test" average="" beam="" lenpen="" samples=0 baseline="" comet=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --prepared) prepared="${2-}"; shift ;;
    --save-dir) save_dir="${2-}"; shift ;;
    --out) out="${2-}"; shift ;;
    --subset) subset="${2-}"; shift ;;
    --average) average="${2-}"; shift ;;
    --beam) beam="${2-}"; shift ;;
    --lenpen) lenpen="${2-}"; shift ;;
    --baseline) baseline="${2-}"; shift ;;
    --comet) comet="${2-}"; shift ;;
    --samples) samples="${2-}"; shift ;;
    --) shift; break ;;
    *) die "unknown option $1; options of fairseq-generate go after --" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$prepared" && -n "$save_dir" && -n "$out" ]] ||
  die "needs --prepared DIR, --save-dir DIR and --out DIR; see --help"
[[ -f "$prepared/manifest.json" ]] || die "--prepared $prepared was not made by prepare.sh or prepare_wmt14.sh, or not to the end"

[[ "${average:-1}" =~ ^[1-9][0-9]*$ ]] || die "--average $average: give a whole number from 1 on"
[[ "${beam:-1}" =~ ^[1-9][0-9]*$ ]] || die "--beam $beam: give a whole number from 1 on"
[[ "${lenpen:-1}" =~ ^-?([0-9]+\.?|[0-9]*\.[0-9]+)$ ]] || die "--lenpen $lenpen: give a number, such as 0.6"
[[ "$samples" =~ ^[0-9]+$ ]] || die "--samples $samples: give a whole number from 0 on"
if [[ -d "$baseline" ]]; then
  baseline="$baseline/$subset.hypotheses.txt"
fi
[[ -z "$baseline" || -f "$baseline" ]] || die "--baseline: no file $baseline"

activate_environment
# Manifests of prepare.sh name neither pair nor recipe, and leave the evaluation to the options.
settings="$(
  python - "$prepared/manifest.json" <<'PYTHON'
import json, sys

try:
    manifest = json.load(open(sys.argv[1], encoding="utf-8"))
    options, evaluation = manifest["options"], manifest.get("evaluation", {})
    print(
        options["source_lang"], options["target_lang"], options.get("pair", "-"),
        options.get("recipe", "sentencepiece"), evaluation.get("average", 5),
        evaluation.get("beam", 5), evaluation.get("lenpen", 1.0),
    )
except (ValueError, KeyError, TypeError, AttributeError):
    sys.exit(f"evaluate.sh: {sys.argv[1]} does not say what was prepared; prepare the data again")
PYTHON
)"
read -r source_lang target_lang pair recipe recipe_average recipe_beam recipe_lenpen <<<"$settings"
[[ -f "$prepared/raw/$subset.$target_lang" ]] || die "--subset $subset is not in $prepared/raw"
average="${average:-$recipe_average}" beam="${beam:-$recipe_beam}" lenpen="${lenpen:-$recipe_lenpen}"
score_options=()
[[ "$pair" == "-" ]] || score_options+=(--language-pair "$pair")
case "$recipe" in
  sentencepiece)
    text_options=(--bpe sentencepiece --sentencepiece-model "$prepared/sentencepiece.model")
    ;;
  clinic)
    text_options=(--bpe subword_nmt --bpe-codes "$prepared/bpe.codes" --tokenizer moses)
    tokenised="$prepared/tokenised/$subset.$target_lang"
    [[ -f "$tokenised" ]] || die "no file $tokenised; --subset $subset needs it, prepare the data again"
    score_options+=(--tokenised-reference "$tokenised")
    ;;
  *) die "$prepared/manifest.json names the recipe $recipe; clinic and sentencepiece are known" ;;
esac
[[ -z "$baseline" ]] || score_options+=(--baseline "$baseline")
[[ -z "$comet" ]] || score_options+=(--comet "$comet")
is_binarised "$prepared" ||
  die "$prepared/data was not made to the end; run the command that prepared it again"
check_same_data "$prepared/data" "$save_dir"
check_writable "$out"
checkpoint="$save_dir/checkpoint.avg$average.pt"
moa-average-checkpoints --inputs "$save_dir" --num-epoch-checkpoints "$average" --output "$checkpoint"

set_device_options
generated="$out/$subset.generate.txt"
options=(--source-lang "$source_lang" --target-lang "$target_lang" --gen-subset "$subset"
  --beam "$beam" --lenpen "$lenpen" --max-tokens 4096 "${device[@]}" "$@")
# The same checkpoint, data and options give the same translations: reuse them.
key="$(cksum <"$checkpoint") $(cksum <"$prepared/manifest.json") ${options[*]}"
if [[ ! -f "$generated" || "$(cat -- "$generated.key" 2>/dev/null)" != "$key" ]]; then
  # Where only the shell of an earlier run was killed, its fairseq-generate still writes: to files
  # without a name from here on.
  rm -f -- "$generated.partial" "$out/$subset.generate.log"
  fairseq-generate "$prepared/data" --user-dir "$(moa-user-dir)" --path "$checkpoint" \
    "${text_options[@]}" "${options[@]}" >"$generated.partial" 2>"$out/$subset.generate.log" ||
    fail_with fairseq-generate "$out/$subset.generate.log" "$generated.partial"
  rm -f -- "$generated.key"
  mv -- "$generated.partial" "$generated"
  write_note "$generated.key" "$key"
fi

score_options+=(--setting "checkpoint=$(basename -- "$checkpoint")" --setting "average=$average"
  --setting "beam=$beam" --setting "lenpen=$lenpen")
[[ $# -eq 0 ]] || score_options+=(--setting "options=$*")
moa-score --generate-output "$generated" --samples "$samples" \
  --source "$prepared/raw/$subset.$source_lang" --reference "$prepared/raw/$subset.$target_lang" \
  --report "$out/$subset" "${score_options[@]}"
