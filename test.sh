#!/usr/bin/env bash
# Sets up and runs the everyday tests from a fresh clone: ./test.sh [pytest arguments]
# VENV (default .venv) is the virtual environment to make or use, PYTHON the interpreter to make it with.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/venv.sh
venv=${VENV:-.venv}
make_venv "$venv" "[test]"
exec "$venv/bin/python" -m pytest "$@"
