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

[[ $# -gt 0 ]] || { usage >&2; exit 2; }
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

[[ "$out" != *,* ]] || die "--out $out: fairseq-preprocess takes no comma in a path"
if [[ -e "$out/data" && ! -e "$out/data/.manifest-checksum" ]]; then
  die "$out/data was not made by this script and would be replaced; choose another --out"
fi
activate_environment
moa-prepare "${arguments[@]}"

# Binarise unless the data was made from just these pieces.
digest="$(cksum <"$out/manifest.json")"
if [[ "$(cat -- "$out/data/.manifest-checksum" 2>/dev/null)" == "$digest" ]]; then
  exit
fi
# fairseq numbers the test sets by their place in this list.
tests="" number=""
while [[ -f "$out/pieces/test$number.$source_lang" ]]; do
  tests="${tests:+$tests,}$out/pieces/test$number"
  number=$((number + 1))
done
rm -rf -- "$out/data" "$out/data.partial"
fairseq-preprocess \
  --source-lang "$source_lang" --target-lang "$target_lang" \
  --trainpref "$out/pieces/train" --validpref "$out/pieces/valid" --testpref "$tests" \
  --joined-dictionary --destdir "$out/data.partial" --workers "$(nproc)" >"$out/preprocess.log" 2>&1 ||
  die "fairseq-preprocess failed; its last line: $(tail -n 1 -- "$out/preprocess.log")"
printf '%s' "$digest" >"$out/data.partial/.manifest-checksum"
mv -- "$out/data.partial" "$out/data"
printf '%s is ready\n' "$out/data" >&2
