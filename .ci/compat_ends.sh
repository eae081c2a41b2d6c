#!/usr/bin/env bash
# Tests the oldest and the newest Python and torch, side by side: compat.sh for each. A pair that this machine has no
# interpreter or no packages for is left out, which one line says. Environments are removed, unless they were there before.
set -euo pipefail
cd "$(dirname "$0")/.."

logs=$(mktemp -d)
made=("$logs")
trap 'rm -rf "${made[@]}"' EXIT

# On PATH, or one of pyenv's that is not in use.
find_python() {
  local python
  for python in "python$1" "$(pyenv prefix "$1" 2>/dev/null)/bin/python"; do
    if "$python" -c '' 2>/dev/null; then echo "$python"; return; fi
  done
  return 1
}

rows=()
for row in 3.10-2.10.0 3.13-2.14.1; do
  if ! python=$(find_python "${row%-*}"); then
    echo "compat: Python ${row%-*} with torch ${row#*-} is left out: there is no python${row%-*}"
    continue
  fi
  [[ -e .venv-compat-$row ]] || made+=(".venv-compat-$row")
  PYTHON=$python TORCH=${row#*-} VENV=.venv-compat-$row .ci/compat.sh "$@" >"$logs/$row" 2>&1 &
  rows+=("$row $!")
done

status=0
for row in "${rows[@]}"; do
  read -r row process <<<"$row"
  result=0
  wait "$process" || result=$?
  name="compat: Python ${row%-*} with torch ${row#*-}"
  case $result in
    0) echo "$name: $(tail -n 1 "$logs/$row")" ;;
    75) echo "$name is left out: $(tail -n 1 "$logs/$row")" ;;
    *) cat "$logs/$row"; echo "$name failed"; status=1 ;;
  esac
done
exit $status
