#!/usr/bin/env bash
# From nothing to a translated and scored test set, on real text, on a laptop.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: quickstart.sh [--pair en-de|en-fr] [--src FILE --tgt FILE] [--out DIR] [--epochs 16]
                     [--vocab-size 4000]

Sets up an environment, prepares parallel text, trains a small MoA Transformer, averages its last
checkpoints, translates a held-out test set, and prints ten translations and the sacreBLEU score
with its signature. It takes under ten minutes on two cores; run again, it reuses what is there and
goes on where it was interrupted.

  --pair PAIR   language pair (default: en-de)
  --src FILE    your own text, one sentence a line, with its translation in
  --tgt FILE    this file; without them the interface texts of Home Assistant are downloaded from
                the Python package index (Apache-2.0, 50 MB)
  --out DIR     where everything goes (default: work/quickstart-PAIR)
  --epochs N    training epochs (default: 16)
  --vocab-size N  pieces of the joint SentencePiece model (default: 4000)
HELP
}

WHEEL="homeassistant==2025.12.5"
pair="en-de" src="" tgt="" out="" epochs=16 vocab_size=4000
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --pair) pair="${2-}"; shift ;;
    --src) src="${2-}"; shift ;;
    --tgt) tgt="${2-}"; shift ;;
    --out) out="${2-}"; shift ;;
    --epochs) epochs="${2-}"; shift ;;
    --vocab-size) vocab_size="${2-}"; shift ;;
    *) die "unknown option $1; see --help" ;;
  esac
  shift || die "the last option needs a value"
done
[[ "$pair" =~ ^[A-Za-z_]+-[A-Za-z_]+$ ]] || die "--pair $pair: give two language codes, such as en-de"
source_lang="${pair%-*}" target_lang="${pair#*-}"
if [[ -z "$src$tgt" ]]; then
  [[ "$pair" == en-de || "$pair" == en-fr ]] ||
    die "--pair $pair: the downloaded text is en-de or en-fr; for others give --src and --tgt"
elif [[ -z "$src" || -z "$tgt" ]]; then
  die "--src and --tgt go together"
fi
for file in ${src:+"$src" "$tgt"}; do
  [[ -f "$file" ]] || die "$file: no such file; --src and --tgt name your own text"
done
[[ "$vocab_size" =~ ^[1-9][0-9]*$ ]] ||
  die "--vocab-size $vocab_size: give a whole number from 1 on"
[[ "$epochs" =~ ^[1-9][0-9]*$ ]] || die "--epochs $epochs: give a whole number from 1 on"
out="${out:-$MOA_ROOT/work/quickstart-$pair}"
scripts="$MOA_ROOT/scripts"
check_prepared "$out/prepared"

activate_environment
mkdir -p -- "$out"
if [[ -n "$src" ]]; then
  text=(--train-source "$src" --train-target "$tgt")
else
  if [[ ! -f "$out/text/test.$target_lang" ]]; then
    say "downloading $WHEEL from the Python package index"
    python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.13.9 \
      --dest "$out/wheel" "$WHEEL"
    python -m moa_fairseq.cli.interface_texts "$out"/wheel/homeassistant-*.whl \
      --source-lang "$source_lang" --target-lang "$target_lang" --out "$out/text"
  fi
  text=(--train "$out/text/train" --valid "$out/text/valid" --test "$out/text/test")
fi

say "preparing text"
bash "$scripts/prepare.sh" --source-lang "$source_lang" --target-lang "$target_lang" \
  --vocab-size "$vocab_size" --out "$out/prepared" "${text[@]}"

say "training for $epochs epochs"
# Small batches and a short warm-up: there is little text and little time.
bash "$scripts/train.sh" --data "$out/prepared/data" --save-dir "$out/checkpoints" -- \
  --max-epoch "$epochs" --max-tokens 2048 --warmup-updates 400 \
  --log-format simple --log-interval 100

say "translating and scoring the test set"
bash "$scripts/evaluate.sh" --prepared "$out/prepared" --save-dir "$out/checkpoints" \
  --out "$out/scores" --samples 10 --average "$((epochs < 5 ? epochs : 5))"
printf '\nscores and translations are in %s\n' "$out/scores"
