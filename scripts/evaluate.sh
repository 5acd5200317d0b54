#!/usr/bin/env bash
# Average, translate, score: a sacreBLEU figure with its signature.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: evaluate.sh --prepared DIR --save-dir DIR --out DIR [--subset test] [--average 5]
                   [--beam 5] [--lenpen 1.0] [--samples 0] [-- options of fairseq-generate]

Averages the last checkpoints, translates a subset with beam search, and scores the detokenised
text against the raw references with sacreBLEU and chrF++. Refuses an incomplete translation.

  --prepared DIR   what prepare.sh made (its --out)
  --save-dir DIR   checkpoints of the training run
  --out DIR        SUBSET.txt and SUBSET.json (scores and signatures), SUBSET.hypotheses.txt,
                   SUBSET.generate.txt (all that fairseq-generate printed)
  --subset NAME    valid, test, test1, … (default: test)
  --average N      epochs to average (default: 5)
  --beam N         beam size (default: 5)
  --lenpen X       length penalty; above 1 favours longer output (default: 1.0)
  --samples N      print N translations beside their references (default: 0)
HELP
}

prepared="" save_dir="" out="" subset="test" average=5 beam=5 lenpen=1.0 samples=0
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
    --samples) samples="${2-}"; shift ;;
    --) shift; break ;;
    *) die "unknown option $1; options of fairseq-generate go after --" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$prepared" && -n "$save_dir" && -n "$out" ]] || { usage >&2; exit 2; }
[[ -f "$prepared/manifest.json" ]] || die "--prepared $prepared was not made by prepare.sh, or not to the end"

activate_environment
read -r source_lang target_lang < <(
  python -c 'import json, sys; o = json.load(open(sys.argv[1]))["options"]; print(o["source_lang"], o["target_lang"])' \
    "$prepared/manifest.json"
)
[[ -f "$prepared/raw/$subset.$target_lang" ]] || die "--subset $subset is not in $prepared/raw"
check_same_data "$prepared/data" "$save_dir"
mkdir -p -- "$out"
checkpoint="$save_dir/checkpoint.avg$average.pt"
moa-average-checkpoints --inputs "$save_dir" --num-epoch-checkpoints "$average" --output "$checkpoint"

set_device_options
generated="$out/$subset.generate.txt"
options=(--source-lang "$source_lang" --target-lang "$target_lang" --gen-subset "$subset"
  --beam "$beam" --lenpen "$lenpen" --max-tokens 4096 "${device[@]}" "$@")
# The same checkpoint, data and options give the same translations: reuse them.
key="$(cksum <"$checkpoint") $(cksum <"$prepared/manifest.json") ${options[*]}"
if [[ ! -f "$generated" || "$(cat -- "$generated.key" 2>/dev/null)" != "$key" ]]; then
  rm -f -- "$generated.key"
  fairseq-generate "$prepared/data" --user-dir "$(moa-user-dir)" --path "$checkpoint" \
    --bpe sentencepiece --sentencepiece-model "$prepared/sentencepiece.model" \
    "${options[@]}" >"$generated.partial" 2>"$out/$subset.generate.log" ||
    die "fairseq-generate failed: $(tail -n 1 -- "$out/$subset.generate.log")"
  mv -- "$generated.partial" "$generated"
  printf '%s' "$key" >"$generated.key"
fi

moa-score --generate-output "$generated" --samples "$samples" \
  --source "$prepared/raw/$subset.$source_lang" --reference "$prepared/raw/$subset.$target_lang" \
  --report "$out/$subset"
