#!/usr/bin/env bash
# Run the tests with every build of fairseq and every Python of the README's table.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# name, Python, build of fairseq, and versions that go with it (none: those of constraints.txt).
# fairseq 0.12.2 is installed first and the package into what is there, as its users would.
ROWS=(
  "ve-fairseq-py311 3.11 ve-fairseq==0.12.3"
  "ve-fairseq-py312 3.12 ve-fairseq==0.12.3"
  "fairseq-fixed-py311 3.11 fairseq-fixed==0.12.3.1"
  "fairseq-py39 3.9 fairseq==0.12.2 torch==1.13.1 torchaudio==0.13.1 numpy==1.23.5"
  "fairseq-py310 3.10 fairseq==0.12.2 torch==2.5.1 torchaudio==2.5.1 numpy==1.26.4"
)
# From text to a score through the real commands, and what no checkpoint may do.
CORE=(
  tests/unit
  tests/integration/test_pipeline.py
  tests/integration/test_bad_checkpoints.py
)

usage() {
  cat <<'HELP'
usage: test_matrix.sh [--only NAME] [--all] [--work DIR]

For every build of fairseq and Python that the README's table names: makes an environment, installs
this package into it, checks that this left fairseq, torch and numpy as they were, and runs the unit
tests and the core of the integration tests. Prints a table, and writes it to DIR/table.md; a row
that could not be run says why. The exit status is 0 where every row ran and passed.

  --only NAME   this row alone: ve-fairseq-py311, ve-fairseq-py312, fairseq-fixed-py311,
                fairseq-py39 or fairseq-py310
  --all         all integration tests but the slow ones
  --work DIR    where environments, logs and results are (default: work/matrix); torch's builds with
                CUDA, which all rows but those of Python 3.11 may get, take 2 to 7 GB each

Interpreters are python3.9, python3.10, ... on the PATH, or those of pyenv. Run again, it reuses its
environments, and the rows that passed with the same files of this package.
HELP
}

only="" work="$MOA_ROOT/work/matrix" tests=("${CORE[@]}")
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --only) only="${2:?--only needs a name}"; shift 2 ;;
    --work) work="${2:?--work needs a folder}"; shift 2 ;;
    --all) tests=(tests); shift ;;
    *) die "unknown option $1; see --help" ;;
  esac
done

# find_interpreter VERSION: prints a Python of this version.
find_interpreter() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [[ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" \
      == "$1" ]]; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

# versions PYTHON: prints the versions of fairseq (by its build), torch and numpy.
versions() {
  "$1" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

def found(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return "none"

print(found("ve-fairseq", "fairseq-fixed", "fairseq"), found("torch"), found("numpy"))
PYTHON
}

# install_fairseq PYTHON BUILD VERSION...: the build with what it needs, as its users get it.
install_fairseq() {
  local python="$1" build="$2"
  shift 2
  local pip=("$python" -m pip --disable-pip-version-check install)
  local pinned=(--constraint "$MOA_ROOT/constraints.txt")
  case "$build" in
    ve-fairseq==*)
      "${pip[@]}" "${pinned[@]}" torch==2.13.0 &&
        "${pip[@]}" "${pinned[@]}" "$build" tensorboardX pytest hypothesis
      ;;
    fairseq-fixed==*)
      "${pip[@]}" "${pinned[@]}" torch==2.13.0 numpy Cython "setuptools<80" wheel &&
        # Built in isolation it would be built with another torch.
        "${pip[@]}" "${pinned[@]}" --no-build-isolation --no-deps "$build" &&
        "${pip[@]}" "${pinned[@]}" bitarray cffi hydra-core omegaconf packaging regex sacrebleu \
          scikit-learn tqdm tensorboardX pytest hypothesis
      ;;
    *)
      # Later versions of pip refuse the metadata of omegaconf 2.0, which fairseq 0.12.2 pins.
      "${pip[@]}" "pip<24.1" && "${pip[@]}" "$@" && "${pip[@]}" "$build" "$@" tensorboardX pytest hypothesis
      ;;
  esac
}

# run_tests PYTHON FOLDER: runs the tests; prints how many passed, failed and were skipped.
run_tests() {
  local python="$1" folder="$2"
  rm -f -- "$folder/junit.xml"
  # A failing test is in the report; without a report pytest itself failed.
  (cd -- "$MOA_ROOT" && OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="" "$python" -m pytest \
    -m "not slow" -p no:cacheprovider --junit-xml "$folder/junit.xml" "${tests[@]}") \
    >"$folder/tests.log" 2>&1 || [[ -s "$folder/junit.xml" ]] || return 1
  "$python" - "$folder/junit.xml" <<'PYTHON'
import sys
from xml.etree import ElementTree

suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite")
run, failed, errors, skipped = (
    int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")
)
print(run - failed - errors - skipped, failed + errors, skipped)
PYTHON
}

# run_row NAME PYTHON BUILD VERSION...: makes, installs and tests; writes the row's result.
run_row() {
  local name="$1" wanted="$2" build="$3" folder="$work/$1"
  shift 3
  local python="$folder/venv/bin/python" interpreter stamp before after counts digest
  local versions_found="- -" reason=""
  mkdir -p -- "$folder"
  digest="$(printf '%s\n' "$name $wanted $build $*" "${tests[@]}" "$sources" | cksum)"
  if [[ "$(sed -n 1p "$folder/result" 2>/dev/null)" == "$digest passed" ]]; then
    say "$name: passed before with the same files"
    return
  fi
  rm -f -- "$folder/result"
  stamp="$(printf '%s\n' "$wanted $build $*" | cat - "$MOA_ROOT/constraints.txt" | cksum)"
  SECONDS=0
  if ! interpreter="$(find_interpreter "$wanted")"; then
    reason="not run: no Python $wanted on the PATH or in pyenv"
  elif [[ "$(cat -- "$folder/installed" 2>/dev/null)" != "$stamp" ]]; then
    say "$name: installing $build; the log is $folder/install.log"
    rm -f -- "$folder/installed"
    if "$interpreter" -m venv --clear "$folder/venv" &&
      install_fairseq "$python" "$build" "$@" >"$folder/install.log" 2>&1; then
      printf '%s' "$stamp" >"$folder/installed"
    else
      reason="not installed: $(grep -v '^WARNING' "$folder/install.log" | tail -n 1 | tr '|' ' ')"
    fi
  fi
  if [[ -z "$reason" ]]; then
    before="$(versions "$python")"
    read -r _ versions_found <<<"$before"
    say "$name: installing moa_fairseq; the log is $folder/plugin.log"
    if ! "$python" -m pip install --editable "$MOA_ROOT" >"$folder/plugin.log" 2>&1; then
      reason="not installed: $(grep -v '^WARNING' "$folder/plugin.log" | tail -n 1 | tr '|' ' ')"
    else
      after="$(versions "$python")"
      [[ "$after" == "$before" ]] || reason="failed: installing changed $before to $after"
    fi
  fi
  local state=failed
  if [[ -z "$reason" ]]; then
    say "$name: testing; the log is $folder/tests.log"
    if counts="$(run_tests "$python" "$folder")"; then
      # shellcheck disable=SC2086  # three numbers
      set -- $counts
      reason="$1 passed, $2 failed, $3 skipped in $((SECONDS / 60)) min"
      [[ "$1" -eq 0 || "$2" -ne 0 ]] || state=passed
    else
      reason="failed: $(tail -n 1 -- "$folder/tests.log" | tr '|' ' ')"
    fi
  fi
  printf '%s %s\n| %s | %s | %s | %s | %s |\n' "$digest" "$state" "${build/==/ }" "$wanted" \
    "${versions_found% *}" "${versions_found#* }" "$reason" >"$folder/result"
}

# What results depend on.
sources="$(cd -- "$MOA_ROOT" && find moa_fairseq scripts tests configs setup.py pyproject.toml \
  constraints.txt -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 cksum | cksum)"
names=()
for row in "${ROWS[@]}"; do
  names+=("${row%% *}")
done
if [[ -n "$only" && " ${names[*]} " != *" $only "* ]]; then
  die "--only $only: no such row; the rows are ${names[*]}"
fi
mkdir -p -- "$work"
work="$(cd -- "$work" && pwd)"
for row in "${ROWS[@]}"; do
  if [[ -z "$only" || "${row%% *}" == "$only" ]]; then
    # shellcheck disable=SC2086  # the columns of a row
    run_row $row
  fi
done
status=0
{
  printf '| fairseq | Python | torch | numpy | tests |\n| --- | --- | --- | --- | --- |\n'
  for name in "${names[@]}"; do
    if [[ -z "$only" || "$name" == "$only" ]]; then
      sed -n 2p "$work/$name/result"
    fi
  done
} | tee -- "$work/table.md"
for name in "${names[@]}"; do
  if [[ -z "$only" || "$name" == "$only" ]]; then
    [[ "$(sed -n '1s/.* //p' "$work/$name/result")" == passed ]] || status=1
  fi
done
exit "$status"
