#!/usr/bin/env bash
# Masked perplexity of a masked language model, and how it was computed.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: evaluate_masked_lm.sh --prepared DIR --save-dir DIR --out DIR [--subset test] [--average N]
                             [--baseline DIR] [-- options of moa-masked-perplexity]

Computes exp of the mean of -ln p over the masked tokens of a split, with a 95 % bootstrap interval
over blocks of text. Which tokens are masked follows from a seed (1, whatever training's was), so
that models on the same data are compared on the same tokens. Says how it was computed: masks,
number of masked tokens, split, subwords, with and without <s> and </s>.

  --prepared DIR   what prepare_wikitext103.sh made (its --out)
  --save-dir DIR   checkpoints of the training run
  --out DIR        SUBSET.txt, SUBSET.json and SUBSET.blocks.tsv (the sums of each block)
  --subset NAME    valid or test (default: test)
  --average N      average the last N epochs (default: take checkpoint_best.pt, which has the
                   lowest validation loss)
  --baseline DIR   the --out of another model's evaluation: adds the ratio of the perplexities with
                   its interval, from the same masked tokens
HELP
}

prepared="" save_dir="" out="" subset="test" average="" baseline=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --prepared) prepared="${2-}"; shift ;;
    --save-dir) save_dir="${2-}"; shift ;;
    --out) out="${2-}"; shift ;;
    --subset) subset="${2-}"; shift ;;
    --average) average="${2-}"; shift ;;
    --baseline) baseline="${2-}"; shift ;;
    --) shift; break ;;
    *) die "unknown option $1; options of moa-masked-perplexity go after --" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$prepared" && -n "$save_dir" && -n "$out" ]] ||
  die "needs --prepared DIR, --save-dir DIR and --out DIR; see --help"
[[ -f "$prepared/manifest.json" && -f "$prepared/data/dict.txt" ]] ||
  die "--prepared $prepared was not made by prepare_wikitext103.sh, or not to the end"
[[ -f "$prepared/data/$subset.idx" ]] || die "--subset $subset is not in $prepared/data; give valid or test"
[[ "${average:-1}" =~ ^[1-9][0-9]*$ ]] || die "--average $average: give a whole number from 1 on"
options=()
if [[ -n "$baseline" ]]; then
  [[ -f "$baseline/$subset.blocks.tsv" ]] ||
    die "--baseline $baseline holds no $subset.blocks.tsv; give the --out of another evaluation"
  options+=(--baseline "$baseline/$subset.blocks.tsv")
fi

activate_environment
is_binarised "$prepared" ||
  die "$prepared/data was not made to the end; run the command that prepared it again"
check_same_data "$prepared/data" "$save_dir"
checkpoint="$save_dir/checkpoint_best.pt"
if [[ -n "$average" ]]; then
  checkpoint="$save_dir/checkpoint.avg$average.pt"
  moa-average-checkpoints --inputs "$save_dir" --num-epoch-checkpoints "$average" --output "$checkpoint"
fi
[[ -f "$checkpoint" ]] || die "--save-dir $save_dir has no checkpoint_best.pt; train first, or give --average N"
check_writable "$out"
moa-masked-perplexity "$prepared/data" --path "$checkpoint" --subset "$subset" \
  --report "$out/$subset" "${options[@]}" "$@"
