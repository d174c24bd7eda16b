# Sourced by demo.sh, test.sh and .ci/run.
#
#   make_venv DIR EXTRAS    a virtual environment in DIR with this checkout installed in place; EXTRAS as in "[test]" or "".
#                           Does nothing when DIR is already newer than pyproject.toml and has those extras.
#   PYTHON names the interpreter; without it the first of python3, python3.11 ... python3.13 that is 3.11 to 3.13.

find_python() {
    local p
    for p in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if "$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            command -v "$p"
            return 0
        fi
    done
    echo "dsjax needs Python 3.11, 3.12 or 3.13; ${PYTHON:-python3} is not one of them. Name one: PYTHON=/path/to/python3.11" >&2
    return 1
}

make_venv() {
    local dir=$1 extras=$2 python stamp
    stamp="$dir/installed$extras"
    if [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then
        return 0
    fi
    if [ ! -x "$dir/bin/python" ]; then
        python=$(find_python) || return 1
        echo "Creating $dir with $("$python" --version)"
        if ! "$python" -m venv "$dir"; then
            rm -rf "$dir"
            echo "Could not create a virtual environment with $python. On Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    echo "Installing dsjax$extras into $dir (a few minutes the first time)"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".$extras" || return 1
    touch "$stamp"
}
