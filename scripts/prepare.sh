#!/usr/bin/env bash
# Raw parallel text to the binarised data of fairseq-train.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: prepare.sh --source-lang LANG --target-lang LANG --out DIR
                  (--train PREFIX | --train-source FILE --train-target FILE)
                  [--valid PREFIX] [--test PREFIX]... [more options of moa-prepare]

Cleans the text, trains a joint SentencePiece model, cuts the text into pieces, and binarises it
with a joined dictionary. Validation and test sets that are not given are held out of the
training text. DIR then holds
  data/                 binarised text, for fairseq-train and fairseq-generate
  raw/                  the text of each split, for scoring
  sentencepiece.model   the joint model
  manifest.json         counts, options, versions and hashes
A second run with the same text and options does nothing; an interrupted one goes on.
`moa-prepare --help` lists all options.
HELP
}

[[ $# -gt 0 ]] || die "needs --source-lang, --target-lang, --train and --out; see --help"
out="" source_lang="" target_lang=""
arguments=("$@")
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --out) out="${2-}" ;;
    --out=*) out="${1#*=}" ;;
    --source-lang) source_lang="${2-}" ;;
    --source-lang=*) source_lang="${1#*=}" ;;
    --target-lang) target_lang="${2-}" ;;
    --target-lang=*) target_lang="${1#*=}" ;;
  esac
  shift
done

check_prepared "$out"
activate_environment
moa-prepare "${arguments[@]}"

binarise "$out" "$source_lang" "$target_lang"
