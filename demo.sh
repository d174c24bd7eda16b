#!/usr/bin/env bash
# The main job from a fresh clone: installs dsjax, starts the server on the embedded model, sends a prompt, prints the
# answer as it streams, and shuts the server down.    ./demo.sh ["a prompt"]
# VENV (default .venv) is the virtual environment to make or use, PYTHON the interpreter to make it with.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/venv.sh
venv=${VENV:-.venv}
prompt=${1:-Once upon a time}
make_venv "$venv" ""

log=$(mktemp)
echo "Starting the server on dsjax-nano (the first start compiles every step shape; later ones read the compile cache)"
"$venv/bin/dsjax-serve" --model=dsjax-nano --port=0 > >(tee "$log") 2>&1 &
server=$!
stop() {
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" || true
    rm -f "$log"
}
trap stop EXIT

until address=$(sed -n 's/.*dsjax-serve ready on \([^ ]*\).*/\1/p' "$log") && [ -n "$address" ]; do
    if ! kill -0 "$server" 2>/dev/null; then
        echo "The server ended before it was ready; its output is above." >&2
        exit 1
    fi
    sleep 0.2
done

echo
echo "> $prompt"
"$venv/bin/dsjax-client" --address="$address" --temperature=0.7 --top_p=0.9 --max_tokens=128 -- "$prompt"
echo
