#!/usr/bin/env bash
# Average the last checkpoints of a training run.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: average_checkpoints.sh SAVE_DIR [N]

Writes SAVE_DIR/checkpoint.avgN.pt, the average of the last N epochs (default: 5).
`moa-average-checkpoints` also averages updates, the best N, and listed files.
HELP
}

case "${1-}" in
  -h | --help) usage; exit ;;
  "") die "needs the folder of the checkpoints; see --help" ;;
esac
number="${2:-5}"
[[ $# -le 2 ]] || die "unknown argument $3; see --help"
activate_environment
moa-average-checkpoints --inputs "$1" --num-epoch-checkpoints "$number" \
  --output "$1/checkpoint.avg$number.pt"
