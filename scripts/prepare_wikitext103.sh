#!/usr/bin/env bash
# WikiText-103, or any text, to the binarised data of fairseq-train's masked language models.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: prepare_wikitext103.sh --out DIR [--recipe gpt2|sentencepiece] [--from-dir DIR]
                              [more options of moa-prepare-wikitext103]

Downloads the archive (192 MB, checked against the digest on record), cuts the text into subwords,
and binarises it. Every step is whole or not there: run it again after an interruption and it goes
on; run it again with nothing changed and it does nothing. DIR then holds
  data/           binarised text, for fairseq-train --task masked_lm
  pieces/         the text in subwords, a line for each of its lines, blank ones too
  dict.txt        all of GPT-2's subwords (gpt2); or sentencepiece.model
  archives/       what was downloaded; may be deleted
  manifest.json   counts of lines, words and subwords, options, versions and digests

  --recipe NAME   gpt2 (default): the subwords of GPT-2, as in fairseq's RoBERTa, whose two files
                  are downloaded as well. With its 50,265 types the paper's numbers of parameters
                  come out; sentencepiece: pieces learned from the text (--vocab-size N)
  --from-dir DIR  archive, or texts wiki.SPLIT.raw, wiki.SPLIT.tokens or SPLIT.txt of your own
                  (SPLIT: train, valid, test); downloads nothing
`moa-prepare-wikitext103 --help` lists all options.
HELP
}

[[ $# -gt 0 ]] || die "needs --out; see --help"
out=""
arguments=("$@")
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --out) out="${2-}" ;;
    --out=*) out="${1#*=}" ;;
  esac
  shift
done

check_prepared "$out"
activate_environment
moa-prepare-wikitext103 "${arguments[@]}"
binarise_text "$out"
