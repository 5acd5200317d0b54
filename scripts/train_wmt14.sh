#!/usr/bin/env bash
# Train one of the paper's WMT14 experiments, or its dense baseline.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: train_wmt14.sh --prepared DIR --save-dir DIR --pair en-de|en-fr --size base|big
                      [--model moa_transformer|transformer] [--gpus N] [--nodes M] [--node-rank R]
                      [--master HOST[:PORT]] [--max-tokens N] [--precision fp16|fp32] [--dry-run]
                      [-- options of fairseq-train]

Runs fairseq-train with the recipe of an experiment. A step has 262,144 tokens on any number of
workers: --update-freq follows from them and from the tokens that fit. Training that was
interrupted goes on from its last checkpoint. The last 10 epochs and the best are kept. Whatever
follows -- comes last and so overrides the recipe.

  --prepared DIR   prepared data: manifest.json and data/
  --save-dir DIR   where checkpoints go
  --pair PAIR      en-de or en-fr; must be that of the data
  --size SIZE      base (8K8E128D) or big (16K32E256D)
  --model NAME     moa_transformer (default), or transformer: fairseq's own of that size, with the
                   same recipe
  --gpus N         GPUs of each node (default: all; without any, one worker on the CPU)
  --nodes M        machines; run the script on each of them, with --node-rank and --master
  --node-rank R    number of this machine, from 0
  --master ADDRESS host, or host:port, of the first machine (port: 29500)
  --max-tokens N   tokens of a batch on one GPU (default: the recipe's on GPUs of 32 GB or more,
                   halved with the memory below that; a rule that was not tried on GPUs)
  --precision P    fp16 (mixed) or fp32 (default: fp16 on GPUs of compute capability 7.0 or more)
  --dry-run        print the command, a line for each node, and run nothing

Read in the authors' code: the recipe of en-de base. Batch, learning rate, warm-up, dropout and
epochs of the other three are recalled from the paper, not read in a source.
HELP
}

[[ $# -gt 0 ]] || die "needs --prepared, --save-dir, --pair and --size; see --help"
prepared="" save_dir="" dry_run=""
arguments=("$@")
while [[ $# -gt 0 && "$1" != "--" ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --prepared) prepared="${2-}" ;;
    --prepared=*) prepared="${1#*=}" ;;
    --save-dir) save_dir="${2-}" ;;
    --save-dir=*) save_dir="${1#*=}" ;;
    --dry-run) dry_run=yes ;;
  esac
  shift
done

activate_environment
# The recipe, the checks and the choice of devices are in Python, where they are tested.
if [[ -n "$dry_run" ]]; then
  exec python -m moa_fairseq.cli.wmt14_train_command "${arguments[@]}"
fi
mapfile -d '' -t command < <(
  python -m moa_fairseq.cli.wmt14_train_command "${arguments[@]}"
)
wait "$!" || exit
check_same_data "$prepared/data" "$save_dir"
record_data "$prepared/data" "$save_dir"
exec "${command[@]}"
