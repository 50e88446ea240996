# Sourced by setup.sh: the environment itself, without its packages.
#
# Leaves the working directory at the repository's root and PATH at the active virtual environment,
# or else at .venv, made with the first python3.11+ found.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    if [[ ! -x .venv/bin/python ]]; then
        found=""
        for candidate in python3 python3.11 python3.12 python3.13; do
            # Running it, and not just finding it: a version manager's shim may stand for nothing.
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                found="$candidate"
                break
            fi
        done
        if [[ -z "$found" ]]; then
            echo "setup: no python3.11 or newer found on PATH" >&2
            exit 2
        fi
        echo "setup: making .venv with $("$found" --version)" >&2
        "$found" -m venv .venv
    fi
    export VIRTUAL_ENV="$PWD/.venv"
fi
export PATH="$VIRTUAL_ENV/bin:$PATH"
# Modules are compiled once, and not by each of the many processes that import them.
unset PYTHONDONTWRITEBYTECODE
