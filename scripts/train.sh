#!/usr/bin/env bash
# Train a MoA Transformer on the data of prepare.sh with a recipe for small data.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: train.sh --data DIR --save-dir DIR [--arch ARCH] [-- options of fairseq-train]

Runs fairseq-train with Adam, an inverse square root schedule, label smoothing 0.1 and, for a MoA
architecture, the router losses, for 20 epochs. Whatever follows -- comes last and so overrides the recipe.
Training that was interrupted goes on from its last checkpoint.

  --data DIR       the data/ folder that prepare.sh made
  --save-dir DIR   where checkpoints go
  --arch ARCH      architecture (default: moa_transformer_tiny); `transformer` is fairseq's own
HELP
}

data="" save_dir="" arch="moa_transformer_tiny"
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --data) data="${2-}"; shift ;;
    --save-dir) save_dir="${2-}"; shift ;;
    --arch) arch="${2-}"; shift ;;
    --) shift; break ;;
    *) die "unknown option $1; options of fairseq-train go after --" ;;
  esac
  shift || die "the last option needs a value"
done
[[ -n "$data" && -n "$save_dir" ]] || die "needs --data DIR and --save-dir DIR; see --help"
compgen -G "$data/dict.*.txt" >/dev/null ||
  die "--data $data holds no dictionary; make it with scripts/prepare.sh"

[[ "$save_dir" != "$data" ]] || die "--save-dir and --data are the same folder"
check_same_data "$data" "$save_dir"
activate_environment
record_data "$data" "$save_dir"
criterion="label_smoothed_cross_entropy"
[[ "$arch" == moa_* ]] && criterion="label_smoothed_cross_entropy_with_router_loss"
set_device_options

exec fairseq-train "$data" --user-dir "$(moa-user-dir)" \
  --save-dir "$save_dir" --arch "$arch" --share-all-embeddings \
  --optimizer adam --adam-betas '(0.9, 0.98)' --lr 3e-3 \
  --lr-scheduler inverse_sqrt --warmup-updates 800 --warmup-init-lr 1e-7 \
  --dropout 0.2 --criterion "$criterion" --label-smoothing 0.1 \
  --max-tokens 4096 --max-epoch 20 --num-workers 0 --seed 1 --keep-last-epochs 5 \
  "${device[@]}" "$@"
