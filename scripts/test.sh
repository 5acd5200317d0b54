#!/usr/bin/env bash
# Run the test suite: linters, type checks, unit and integration tests.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
usage: test.sh [options of pytest]

Sets up an environment where there is none, then runs ruff, mypy, shellcheck and pytest.
Tests that take long are left out; `test.sh -m slow` runs those alone. With MOA_SHARED naming a
folder of parallel corpora and reference checkpoints, tests on them run too.
HELP
}

case "${1-}" in
  -h | --help) usage; exit ;;
esac
activate_environment
cd -- "$MOA_ROOT"
ruff check .
ruff format --check .
mypy
shellcheck -x scripts/*.sh scripts/*.slurm .ci/run
if [[ $# -eq 0 ]]; then
  set -- -m "not slow"
fi
# Two workers with threads of their own would only wait for each other on two cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file's tests share what they trained, so they stay on one worker.
python -m pytest -n 2 --dist loadfile "$@"
