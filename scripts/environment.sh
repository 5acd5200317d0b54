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

# refuse FILE MESSAGE: dies in one line on a file that the system refuses; MESSAGE is what a command
# said of it.
refuse() {
  local reason="${2##*: }" remedy="choose a place that you have access to"
  case "$reason" in
    *"No space left"* | *quota*) remedy="free some space and run this again" ;;
    *"File too large"*) remedy="raise the limit on the size of files (ulimit -f) and run this again" ;;
  esac
  die "$1: $reason; $remedy"
}

# check_writable FOLDER: makes FOLDER where it is missing, and dies where nothing can be written there.
check_writable() {
  local said
  said="$(LC_ALL=C mkdir -p -- "$1" 2>&1)" || refuse "$1" "$said"
  # 64 KB, so that a disk with a few bytes left counts as full; without a name, so that nothing stays.
  # shellcheck disable=SC2094  # removed, not read
  said="$(LC_ALL=C; { { rm -f -- "$1/.probe.$$"; head -c 65536 /dev/zero; } >"$1/.probe.$$"; } 2>&1)" ||
    refuse "$1" "$said"
}

# write_note FILE TEXT: writes a note that is whole or not there, or dies in one line. Notes that
# were left half written by a shell that was killed go.
write_note() {
  local said partial other
  partial="$1.$(uname -n)"
  for other in "$partial."*; do
    [[ ! -e "$other" ]] || kill -0 "${other##*.}" 2>/dev/null || rm -f -- "$other"
  done
  partial="$partial.$$"
  if ! said="$(LC_ALL=C; { printf '%s' "$2" >"$partial" && mv -f -- "$partial" "$1"; } 2>&1)"; then
    rm -f -- "$partial"
    refuse "$1" "$said"
  fi
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

# check_prepared OUT: dies where binarise could not write to OUT/data, or would replace the user's.
check_prepared() {
  [[ "$1" != *,* ]] || die "--out $1: fairseq-preprocess takes no comma in a path"
  if [[ -e "$1/data" && ! -e "$1/data/.manifest-checksum" ]]; then
    die "$1/data was not made by this script and would be replaced; choose another --out"
  fi
}

# is_binarised OUT: whether OUT/data was made, to the end, of what OUT/manifest.json describes.
is_binarised() {
  [[ "$(cat -- "$1/data/.manifest-checksum" 2>/dev/null)" == "$(cksum <"$1/manifest.json")" ]]
}

# binarise OUT SOURCE_LANG TARGET_LANG: makes OUT/data of the subwords in OUT/pieces, unless it was
# made from just these.
binarise() {
  local out="$1" tests="" number=""
  # fairseq numbers the test sets by their place in this list.
  while [[ -f "$out/pieces/test$number.$2" ]]; do
    tests="${tests:+$tests,}$out/pieces/test$number"
    number=$((number + 1))
  done
  preprocess "$out" --source-lang "$2" --target-lang "$3" --joined-dictionary --testpref "$tests"
}

# binarise_text OUT: as binarise, for text of one language; with the dictionary OUT/dict.txt where
# there is one.
binarise_text() {
  local dictionary=()
  [[ ! -f "$1/dict.txt" ]] || dictionary=(--srcdict "$1/dict.txt")
  preprocess "$1" --only-source --testpref "$1/pieces/test" "${dictionary[@]}"
}

# preprocess OUT OPTIONS: runs fairseq-preprocess on OUT/pieces, unless OUT/data is what it would make.
preprocess() {
  local out="$1" partial="$1/data.partial.$$" reporter status=0
  shift
  if is_binarised "$out"; then
    return
  fi
  check_writable "$out"
  say "binarising; fairseq-preprocess writes to $out/preprocess.log"
  # Where only the shell of an earlier run was killed, its fairseq-preprocess still writes: to a
  # folder and a log of its own, which are gone now.
  rm -rf -- "$out"/data.partial* "$out/preprocess.log"
  # fairseq-preprocess shows no progress, and takes hours on 40 million pairs.
  # The reporter ends with this shell: once that is gone, it has another parent.
  {
    self="$BASHPID"
    while sleep 10 >/dev/null 2>&1 && [[ "$(ps -o ppid= -p "$self" | tr -d " ")" == "$$" ]]; do
      printf 'binarising: %s written so far\n' "$(du -sh -- "$partial" | cut -f 1)" >&2
    done
  } &
  reporter=$!
  fairseq-preprocess --trainpref "$out/pieces/train" --validpref "$out/pieces/valid" "$@" \
    --destdir "$partial" --workers "$(nproc)" >"$out/preprocess.log" 2>&1 || status=$?
  kill "$reporter" 2>/dev/null || true
  wait "$reporter" 2>/dev/null || true
  [[ "$status" -eq 0 ]] || fail_with fairseq-preprocess "$out/preprocess.log" "$partial"
  write_note "$partial/.manifest-checksum" "$(cksum <"$out/manifest.json")"
  # Earlier data goes only now that there is other to take its place.
  rm -rf -- "$out/data"
  mv -- "$partial" "$out/data"
  printf '%s is ready\n' "$out/data" >&2
}

# fail_with COMMAND LOG PARTIAL: removes what a command left half written, and dies with the last line of
# its log, or with what keeps that folder from being written to.
fail_with() {
  local last said
  last="$(tail -n 1 -- "$2" 2>/dev/null | cut -c 1-500)"
  if ! said="$(check_writable "$(dirname -- "$2")" 2>&1)"; then
    rm -rf -- "$3"
    die "$1 failed: ${said#*: }"
  fi
  rm -rf -- "$3"
  die "$1 failed; its last line: $last"
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
# The workers of one training run all do this at the same moment.
record_data() {
  check_writable "$2"
  if [[ -f "$1/.manifest-checksum" ]]; then
    write_note "$2/.data-checksum" "$(cat -- "$1/.manifest-checksum")"
  fi
}

# set_device_options: sets the array `device` to what fairseq's commands need without a GPU.
set_device_options() {
  device=()
  # shellcheck disable=SC2034  # the scripts that source this read it
  python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || device=(--cpu)
}
