#!/usr/bin/env bash
# Makes the environment of `make demo` and `make test`: .venv at the root with this package and its host.
# Idempotent: a stamp holds what was installed; an interrupted run starts again where pip left off.
# As root or not; needs python3 >= 3.11 with venv. usage: scripts/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv
stamp=$venv/.sglang-dflow-stamp
want="$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1) $PWD"

installed='from importlib.metadata import version; version("sglang"), version("sglang-dflow")'
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$venv/bin/python" -c "$installed" 2>/dev/null; then
  echo "setup: .venv is up to date"
  exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $("$python" --version) is too old, expected Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 1
}
# One whose interpreter is gone, or whose creation was interrupted before pip was in it, cannot be mended: make it anew.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "setup: creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

echo "setup: installing sglang and this package into $venv (about 11 GB and some minutes the first time)"
began=$SECONDS
log=$venv/setup.log
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -e '.[dev,train,bench]' >"$log" 2>&1 &
pip=$!
trap 'kill "$pip" 2>/dev/null || true' EXIT
while kill -0 "$pip" 2>/dev/null; do
  sleep 2
  if [ $(((SECONDS - began) % 10)) -lt 2 ]; then
    echo "setup: $((SECONDS - began)) s: $(grep -E '^ *(Collecting|Downloading|Processing|Building|Installing|Preparing|Using)' "$log" | tail -n 1 | cut -c1-100)"
  fi
done
trap - EXIT
if ! wait "$pip"; then
  tail -n 20 "$log" >&2
  echo "setup: pip failed; the whole log is in $log. Mend the cause and run the same command again" >&2
  exit 1
fi
printf '%s' "$want" >"$stamp"
echo "setup: done after $((SECONDS - began)) s"
