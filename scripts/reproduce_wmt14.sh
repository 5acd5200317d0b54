#!/usr/bin/env bash
# One of the paper's WMT14 experiments from the archives to its score.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: reproduce_wmt14.sh --pair en-de|en-fr --size base|big [--model moa_transformer|transformer]
                          [--recipe sentencepiece|clinic] [--from-dir DIR] [--out DIR] [--gpus N]
                          [--baseline DIR] [--dry-run] [--smoke] [--smoke-text DIR]

Runs prepare_wmt14.sh, train_wmt14.sh and evaluate.sh in turn. Run it again after an interruption
and it goes on; what is done is not done again.

  --pair PAIR, --size SIZE   the experiment
  --model NAME      moa_transformer (default), or transformer: the dense baseline
  --recipe NAME     of the text: sentencepiece (default), or clinic: the authors' data
  --from-dir DIR    archives that you have; downloads nothing
  --out DIR         where everything goes (default: work/wmt14)
  --gpus N          GPUs of this machine (default: all)
  --baseline DIR    the scores folder of another run, tested against this one
  --dry-run         print every command and what the experiment takes, and run nothing
  --smoke           the whole chain in minutes on a CPU: miniature archives of a toy language, a
                    small model, a few epochs. Its score means nothing
  --smoke-text DIR  make the miniature archives of train, valid and test.LANG in this folder, of
                    at most 12,000 training pairs
For several machines run train_wmt14.sh, or train_wmt14.slurm, by itself.
HELP
}

pair="" size="" model="moa_transformer" recipe="sentencepiece" out="" gpus="" from_dir=""
baseline="" dry_run="" smoke="" smoke_text=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --pair) pair="${2-}"; shift ;;
    --size) size="${2-}"; shift ;;
    --model) model="${2-}"; shift ;;
    --recipe) recipe="${2-}"; shift ;;
    --from-dir) from_dir="${2-}"; shift ;;
    --out) out="${2-}"; shift ;;
    --gpus) gpus="${2-}"; shift ;;
    --baseline) baseline="${2-}"; shift ;;
    --dry-run) dry_run=yes ;;
    --smoke) smoke=yes ;;
    --smoke-text) smoke=yes smoke_text="${2-}"; shift ;;
    *) die "unknown option $1; see --help" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$pair" && -n "$size" ]] || die "needs --pair and --size; see --help"
[[ "$pair" == en-de || "$pair" == en-fr ]] || die "--pair $pair: give en-de or en-fr"
[[ "$size" == base || "$size" == big ]] || die "--size $size: give base or big"
[[ "$model" == moa_transformer || "$model" == transformer ]] ||
  die "--model $model: give moa_transformer or transformer"
[[ "$recipe" == sentencepiece || "$recipe" == clinic ]] ||
  die "--recipe $recipe: give sentencepiece or clinic"
[[ -z "$smoke" || -z "$from_dir" ]] || die "--smoke makes its own archives; leave --from-dir out"
[[ -z "$smoke_text" || -d "$smoke_text" ]] || die "--smoke-text $smoke_text: no such folder"

activate_environment
out="${out:-$MOA_ROOT/work/wmt14${smoke:+-smoke}}"
prepared="$out/$pair.$recipe" run="$out/$pair.$recipe.$model-$size"
prepare=(--pair "$pair" --recipe "$recipe" --out "$prepared")
train=(--prepared "$prepared" --save-dir "$run" --pair "$pair" --size "$size" --model "$model")
evaluate=(--prepared "$prepared" --save-dir "$run" --out "$run/scores")
[[ -z "$from_dir" ]] || prepare+=(--from-dir "$from_dir")
[[ -z "$gpus" ]] || train+=(--gpus "$gpus")
[[ -z "$baseline" ]] || evaluate+=(--baseline "$baseline")
miniature=(--pair "$pair" --out "$out/miniature.$pair")
if [[ -n "$smoke" ]]; then
  vocab_size=60 max_epoch=16 max_tokens=1024
  if [[ -n "$smoke_text" ]]; then
    miniature+=(--text "$smoke_text" --train-lines 12000)
    vocab_size=4000 max_epoch=10 max_tokens=2048
  fi
  prepare+=(--from-dir "$out/miniature.$pair" --vocab-size "$vocab_size"
    --checksums "$out/miniature.$pair/SHA256SUMS")
  # Everything of the recipe that does not make it long: the sizes and the schedule.
  train+=(-- --encoder-embed-dim 64 --decoder-embed-dim 64 --encoder-ffn-embed-dim 128
    --decoder-ffn-embed-dim 128 --encoder-layers 1 --decoder-layers 1 --dropout 0.1
    --attention-dropout 0 --activation-dropout 0 --max-epoch "$max_epoch" --lr 5e-3
    --warmup-updates 200 --max-tokens "$max_tokens" --update-freq 1 --num-workers 0)
  [[ "$model" == transformer ]] || train+=(--head-dim 16)
  evaluate+=(--samples 3)
fi

if [[ -n "$dry_run" ]]; then
  [[ -z "$smoke" ]] || printf 'python -m moa_fairseq.cli.wmt14_miniature%s\n' "$(printf ' %q' "${miniature[@]}")"
  printf 'bash scripts/prepare_wmt14.sh%s\n' "$(printf ' %q' "${prepare[@]}")"
  printf 'bash scripts/train_wmt14.sh%s\n' "$(printf ' %q' "${train[@]}")"
  printf 'bash scripts/evaluate.sh%s\n' "$(printf ' %q' "${evaluate[@]}")"
  printf '\nwhere train_wmt14.sh runs\n'
  python -m moa_fairseq.cli.wmt14_train_command --dry-run "${train[@]}"
  [[ -n "$smoke" ]] || {
    printf '\nand the experiment takes about\n'
    python -m moa_fairseq.cli.wmt14_estimate --pair "$pair" --size "$size" --model "$model" \
      --recipe "$recipe"
  }
  exit
fi

scripts="$MOA_ROOT/scripts"
if [[ -n "$smoke" ]]; then
  say "making miniature archives"
  python -m moa_fairseq.cli.wmt14_miniature "${miniature[@]}"
fi
say "preparing $pair"
bash "$scripts/prepare_wmt14.sh" "${prepare[@]}"
say "training $model $size"
bash "$scripts/train_wmt14.sh" "${train[@]}"
say "averaging, translating and scoring"
bash "$scripts/evaluate.sh" "${evaluate[@]}"
printf '\nscores and translations are in %s\n' "$run/scores"
