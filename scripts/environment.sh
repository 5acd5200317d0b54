# shellcheck shell=bash
# Sourced by the other scripts: makes this package and its commands available.
#
# An environment that is active and has moa_fairseq is used as it is. Otherwise one is made in
# .venv (or $MOA_VENV), with the versions of constraints.txt, and reused while they stay the same.

MOA_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
  exit 1
}

say() {
  printf '\n== %s\n' "$*" >&2
}

# find_python: prints the first interpreter that the wheels of constraints.txt are built for.
find_python() {
  local candidate
  for candidate in ${MOA_PYTHON:+"$MOA_PYTHON"} python3.11 python3.12 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
      2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "Python 3.11 or 3.12 is needed; install one, or name it with MOA_PYTHON=/path/to/python"
}

# activate_environment: called once by each script that runs Python.
activate_environment() {
  if [[ -z "${MOA_VENV:-}" ]] && command -v moa-user-dir >/dev/null; then
    return
  fi
  local venv="${MOA_VENV:-$MOA_ROOT/.venv}" python wanted
  wanted="$(cat -- "$MOA_ROOT/constraints.txt" "$MOA_ROOT/setup.py" | cksum)"
  if [[ "$(cat -- "$venv/.moa-installed" 2>/dev/null)" != "$wanted" ]]; then
    python="$(find_python)"
    if [[ -n "$(ls -A -- "$venv" 2>/dev/null)" && ! -e "$venv/.moa-environment" ]]; then
      die "$venv was not made by these scripts; activate it yourself, or name another with MOA_VENV"
    fi
    say "setting up $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
    : >"$venv/.moa-environment"
    "$venv/bin/python" -m pip install --quiet --constraint "$MOA_ROOT/constraints.txt" \
      torch==2.13.0 --editable "${MOA_ROOT}[fairseq,dev]"
    printf '%s' "$wanted" >"$venv/.moa-installed"
  fi
  # shellcheck disable=SC1091
  source "$venv/bin/activate"
}

# check_same_data DATA SAVE_DIR: dies where SAVE_DIR holds checkpoints of other data than DATA.
# Dictionaries of one size would otherwise let a model of other text pass unnoticed.
check_same_data() {
  local trained_on
  trained_on="$(cat -- "$2/.data-checksum" 2>/dev/null || true)"
  if [[ -n "$trained_on" && "$trained_on" != "$(cat -- "$1/.manifest-checksum" 2>/dev/null)" ]]; then
    die "$2 holds checkpoints that were trained on other data than $1; choose another folder"
  fi
}

# record_data DATA SAVE_DIR: notes for check_same_data what SAVE_DIR's checkpoints are trained on.
# Whole or not at all, since the workers of one training run all do this at the same moment.
record_data() {
  local partial
  mkdir -p -- "$2"
  if [[ -f "$1/.manifest-checksum" ]]; then
    partial="$2/.data-checksum.$(uname -n).$$"
    cp -- "$1/.manifest-checksum" "$partial"
    mv -f -- "$partial" "$2/.data-checksum"
  fi
}

# set_device_options: sets the array `device` to what fairseq's commands need without a GPU.
set_device_options() {
  device=()
  # shellcheck disable=SC2034  # the scripts that source this read it
  python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || device=(--cpu)
}
