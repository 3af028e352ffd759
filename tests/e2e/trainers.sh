#!/usr/bin/env bash
# Projections against the trainers' real classes: `make e2e-trainers`.
# Makes an environment for each trainer (trainers/NAME/requirements.txt), once, then runs trainers/NAME/check.py in it, in
# a network that has only loopback. Arguments: names of trainers. Fails if one of them could not be checked.
#   E2E_PYTHON_312   a Python 3.12 or newer, for trainers that need one, where PYTHON is older
set -euo pipefail
# shellcheck source=tests/e2e/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folders="$here/trainers"
logs="$E2E_CACHE/trainers/logs"
mkdir -p "$logs"
need ip iproute2
need unshare util-linux

# interpreter REQUIREMENTS: the Python for a trainer; a comment in its requirements says what it needs beyond PYTHON.
interpreter() {
  local minor candidate
  minor="$(sed -n 's/^# Python 3\.\([0-9]*\) or newer.*/\1/p' "$1")"
  for candidate in "$PYTHON" "${E2E_PYTHON_312:-}" python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if [[ -n $candidate ]] && "$candidate" -c "import sys; sys.exit(sys.version_info < (3, ${minor:-11}))" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  say "error: expected Python 3.$minor or newer, $PYTHON is $("$PYTHON" -V)"
  say "hint: name one: E2E_PYTHON_312=/path/to/python3.12"
  return 3
}

# shared_torch FOLDER PIN: PyTorch and what it needs, whichever build the registry has, once for all trainers of its pin.
shared_torch() {
  local folder="$E2E_CACHE/$1" recipe
  recipe="$("$PYTHON" -V) $2"
  made "$folder" "$recipe" && return
  say "making the environment $1"
  rm -rf "$folder"
  "$PYTHON" -m venv "$folder"
  "$folder/bin/pip" install -q "$2" >"$logs/torch.log" 2>&1 || {
    cat "$logs/torch.log" >&2
    return 1
  }
  keep "$folder" "$recipe"
}

# trainer_environment NAME: everything pinned below $E2E_CACHE/trainers/NAME; PyTorch is found behind it.
trainer_environment() {
  local requirements="$folders/$1/requirements.txt" pin tag
  PYTHON="$(interpreter "$requirements")"
  # A package that wants a newer Python than what is checked of it.
  if grep -q '^# .*--ignore-requires-python' "$requirements"; then export PIP_IGNORE_REQUIRES_PYTHON=1; fi
  pin="$(grep '^torch==' "$requirements" || true)"
  grep -v '^torch==' "$requirements" >"$E2E_CACHE/trainers/$1.txt"
  environment "trainers/$1" "$E2E_CACHE/trainers/$1.txt"
  [[ -n $pin ]] || return 0
  tag="$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
  shared_torch "trainers/${pin/==/-}-$tag" "$pin"
  echo "$E2E_CACHE/trainers/${pin/==/-}-$tag/lib/$tag/site-packages" \
    >"$E2E_CACHE/trainers/$1/lib/$tag/site-packages/shared-torch.pth"
}

# check NAME: run its check; the last line of its output is what it checked.
check() {
  local as_root=()
  [[ $(id -u) == 0 ]] || as_root=(--map-root-user)
  HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONPATH='' PYTHONWARNINGS=ignore \
    unshare "${as_root[@]}" --net -- sh -c 'ip link set lo up && exec "$@"' sh \
    "$E2E_CACHE/trainers/$1/bin/python" "$folders/$1/check.py" >"$logs/$1.out" 2>"$logs/$1.err" || {
    tail -n 40 "$logs/$1.out" "$logs/$1.err" >&2
    return 1
  }
  tail -n 1 "$logs/$1.out"
}

main() {
  local names=("$@") failed=() lines="$logs/checked.jsonl" name path code
  if ((${#names[@]} == 0)); then
    for path in "$folders"/*/check.py; do names+=("$(basename "$(dirname "$path")")"); done
  fi
  : >"$lines"
  for name in "${names[@]}"; do
    if [[ ! -f $folders/$name/check.py || ! -f $folders/$name/requirements.txt ]]; then
      say "error: no check.py and requirements.txt for '$name' in ${folders#"$repository"/}"
      failed+=("$name")
      continue
    fi
    say "checking $name"
    # Not in a condition: `set -e` would not hold inside it.
    set +e
    (
      set -e
      trainer_environment "$name"
      check "$name" >>"$lines"
    )
    code=$?
    set -e
    ((code == 0)) || failed+=("$name")
  done

  "$PYTHON" "$folders/report.py" "${#names[@]}" <"$lines" || failed+=("report")
  if ((${#failed[@]})); then
    say "error: not checked: ${failed[*]}"
    exit 1
  fi
}

main "$@"
