# Sourced by the other scripts: `source "$(dirname "$0")/setup.sh"`.
#
# Leaves the working directory at the repository's root and PATH at an environment that has the
# package installed editable with its test tools, under scripts/constraints.txt: the active virtual
# environment, or else .venv, made with the first python3.11+ found. Prints one line when it
# installs, and nothing when the environment is up to date.

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# The root is in the stamp too: an editable install of another clone is not this one.
stamp="$VIRTUAL_ENV/.dcp-placements-installed"
wanted="$({ pwd; cat pyproject.toml scripts/constraints.txt; } | python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
    echo "setup: installing dcp-placements and its test tools into $VIRTUAL_ENV" >&2
    # uv takes a fifth of pip's time. It does not read pip's configuration: torch, of which an index
    # may have a CPU build, is pip's, and so is everything where uv finds no index.
    python -m pip install -qq --no-compile -c scripts/constraints.txt torch uv
    package='.[test,test-frameworks]'
    uv pip install -q -c scripts/constraints.txt -e "$package" ||
        python -m pip install -qq --no-compile -c scripts/constraints.txt -e "$package"
    echo "$wanted" >"$stamp"
fi
