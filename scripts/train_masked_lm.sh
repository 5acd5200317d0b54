#!/usr/bin/env bash
# Train a masked language model of the paper's, or its dense baseline.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: train_masked_lm.sh --data DIR --save-dir DIR [--model 8K8E128D] [--gpus N] [--dry-run]
                          [-- options of fairseq-train]

Runs fairseq-train --task masked_lm with the paper's recipe: samples of 128 tokens, 524,288 tokens a
step on any power of two of GPUs up to 32, 60 epochs. Whatever follows -- comes last and so overrides
the recipe. Training that was interrupted goes on from its last checkpoint.

  --data DIR       the data/ folder that prepare_wikitext103.sh made
  --save-dir DIR   where checkpoints go
  --model NAME     nKmEpD: n of m experts for a token, heads of dimension p. The paper has 8K8E128D
                   (default), 8K8E256D, 8K16E256D, 8K32E256D and 8K64E256D; dense: its Transformer
  --gpus N         GPUs of this machine (default: all; without any, one worker on the CPU)
  --dry-run        print the command and run nothing

Sizes, batch, learning rate, warm-up, dropout and epochs are recalled from the paper, not read in a
source; the schedule and the optimizer's other settings are not known, and are fairseq's usual ones
for RoBERTa and inverse square root. Projections have biases and text GPT-2's subwords, since with
both the paper's numbers of parameters come out.
HELP
}

data="" save_dir="" model="8K8E128D" gpus="" dry_run=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --data) data="${2-}"; shift ;;
    --save-dir) save_dir="${2-}"; shift ;;
    --model) model="${2-}"; shift ;;
    --gpus) gpus="${2-}"; shift ;;
    --dry-run) dry_run=yes ;;
    --) shift; break ;;
    *) die "unknown option $1; options of fairseq-train go after --" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$data" && -n "$save_dir" ]] || die "needs --data DIR and --save-dir DIR; see --help"
[[ -f "$data/dict.txt" ]] || die "--data $data holds no dict.txt; make it with scripts/prepare_wikitext103.sh"
[[ "$save_dir" != "$data" ]] || die "--save-dir and --data are the same folder"
[[ "${gpus:-1}" =~ ^[1-9][0-9]*$ ]] || die "--gpus $gpus: give a whole number from 1 on"
if [[ "$model" == dense ]]; then
  architecture=(--arch dense_masked_lm --criterion masked_lm)
elif [[ "$model" =~ ^([1-9][0-9]*)K([1-9][0-9]*)E([1-9][0-9]*)D$ ]]; then
  architecture=(--arch moa_masked_lm --criterion masked_lm_with_router_loss --projection-bias
    --encoder-attention-heads "${BASH_REMATCH[1]}" --num-experts "${BASH_REMATCH[2]}"
    --head-dim "${BASH_REMATCH[3]}")
else
  die "--model $model: give a MoA such as 8K8E128D, or dense"
fi

activate_environment
visible="$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')"
[[ -n "$dry_run" || "${gpus:-0}" -le "$visible" ]] ||
  die "--gpus $gpus: torch sees $visible on this machine; lower it, or leave it out"
gpus="${gpus:-$visible}"
workers="$((gpus > 0 ? gpus : 1))"
((32 % workers == 0)) ||
  die "--gpus $workers does not divide the 32 batches of a step; give a power of two up to 32"
device=(--cpu)
[[ "$gpus" -eq 0 ]] || device=(--fp16 --distributed-world-size "$gpus")

command=(fairseq-train "$data" --user-dir "$(moa-user-dir)" --task masked_lm
  --save-dir "$save_dir" "${architecture[@]}"
  --sample-break-mode none --tokens-per-sample 128 --mask-prob 0.15
  --dropout 0.1 --attention-dropout 0.0 --activation-dropout 0.0
  --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 0.0
  --lr 6e-4 --lr-scheduler inverse_sqrt --warmup-updates 2000
  --max-tokens 16384 --update-freq "$((32 / workers))" --max-epoch 60 --seed 1
  --save-interval-updates 1000 --keep-interval-updates 1 --keep-last-epochs 5
  --log-format simple --log-interval 100 "${device[@]}" "$@")
if [[ -n "$dry_run" ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit
fi
check_same_data "$data" "$save_dir"
record_data "$data" "$save_dir"
exec "${command[@]}"
