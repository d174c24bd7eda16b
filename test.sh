#!/usr/bin/env bash
# Sets up and runs the everyday tests from a fresh clone: ./test.sh [pytest arguments]
# VENV (default .venv) is the virtual environment to make or use, PYTHON the interpreter to make it with.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/venv.sh
venv=${VENV:-.venv}
make_venv "$venv" "[test]"
# Two workers: compiling, which is most of the time, uses one core. A file stays on one worker, which keeps its models.
exec "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile "$@"
