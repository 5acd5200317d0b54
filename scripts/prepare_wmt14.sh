#!/usr/bin/env bash
# The archives of the WMT14 shared tasks to the binarised data of fairseq-train.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: prepare_wmt14.sh --pair en-de|en-fr --out DIR [--recipe sentencepiece|clinic]
                        [--from-dir DIR] [more options of moa-prepare-wmt14]

Downloads the archives, checks them, cleans the training text, learns joint subwords, and
binarises. Every step is whole or not there: run it again after an interruption and it goes on;
run it again with nothing changed and it does nothing. DIR then holds
  data/                 binarised text, for fairseq-train and fairseq-generate
  raw/                  validation and test text as it is scored
  tokenised/            the same as Moses tokenises it (clinic recipe)
  sentencepiece.model   or bpe.codes (clinic recipe)
  archives/             what was downloaded; may be deleted
  manifest.json         counts after each step, options, versions and digests

  --pair PAIR     en-de (4.5 million pairs, 10 GB of disk) or en-fr (40 million pairs, 75 GB)
  --recipe NAME   sentencepiece (default): raw text, joint SentencePiece;
                  clinic: the authors' data, Moses text and joint byte-pair encoding
  --from-dir DIR  archives, or texts unpacked from them, that you have; downloads nothing
`moa-prepare-wmt14 --help` lists all options.
HELP
}

[[ $# -gt 0 ]] || die "needs --pair and --out; see --help"
out="" pair=""
arguments=("$@")
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --out) out="${2-}" ;;
    --out=*) out="${1#*=}" ;;
    --pair) pair="${2-}" ;;
    --pair=*) pair="${1#*=}" ;;
  esac
  shift
done

check_prepared "$out"
activate_environment
moa-prepare-wmt14 "${arguments[@]}"
binarise "$out" "${pair%-*}" "${pair#*-}"
