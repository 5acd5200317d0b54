#!/usr/bin/env bash
# Train and evaluate a grid of sizes: experts E, selected experts K, head dimension D.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: sweep.sh --prepared DIR --out DIR [--num-experts E,…] [--heads K,…] [--head-dim D,…]
                [--dense [HEADS]] [--seeds S,…] [--average N] [--bleu SUBSET,…] [--jobs N]
                [-- settings in hydra's form]

Trains every combination by configs/sweep_experts.yaml, then measures the loss of the averaged
model on the validation set. Points with K > E are skipped. The same command again goes on: what is
finished stays, a point that was interrupted goes on from its last checkpoint (one is saved after
each epoch), one that failed is tried again; more sizes or seeds are added to those that are there.
moa-sweep-report makes a table and a picture of what there is so far.

  --prepared DIR    what prepare.sh or prepare_wmt14.sh made (its --out)
  --out DIR         sweep.json, and a folder of checkpoints and logs for each point, such as
                    8K32E32D-seed1
  --num-experts E,… numbers of experts (default: 8,32)
  --heads K,…       numbers of experts that a token uses (default: 4,8)
  --head-dim D,…    dimensions of a head (default: 16,32)
  --dense [HEADS]   fairseq's Transformer too, as the baseline (default: with 4 heads)
  --seeds S,…       each point once for each seed (default: 1)
  --average N       epochs to average before evaluation (default: 5)
  --bleu SUBSET,…   translate these too, by evaluate.sh: valid, to choose by. Naming test measures
                    the test set, to report and not to choose by
  --jobs N          points at a time (default: one on each GPU; without a GPU one on each core). A
                    point has one GPU; or the cores divided by N as its threads, but for
                    OMP_NUM_THREADS

Settings after -- are those of fairseq-hydra-train, the same for all points, for instance
optimization.max_epoch=10 model.encoder_embed_dim=256 +model.gate_normalization=none. Those of MoA
do not go to the dense baseline. A point that fails does not stop the others; the exit status is
then 1.
HELP
}

[[ $# -gt 0 ]] || die "needs --prepared DIR and --out DIR; see --help"
for argument in "$@"; do
  case "$argument" in
    -h | --help) usage; exit ;;
    --) break ;;
  esac
done

activate_environment
# Not by hydra's launchers: its own runs one point after the other, and that of joblib keeps a
# process for several points, which then cannot have a GPU each, and share what fairseq remembers.
exec python -m moa_fairseq.cli.sweep --root "$MOA_ROOT" "$@"
