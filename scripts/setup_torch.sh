# Sourced by scripts/test: `source scripts/setup_torch.sh VERSION`.
#
# Leaves the working directory at the repository's root and PATH at .venv-torch-VERSION, which has
# that torch with the libraries that its import needs (no triton), and the test tools under
# scripts/constraints.txt. Installs once; remove the folder to install again. The frameworks of
# test-frameworks are not installed: their tests are skipped.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version="$1"
VIRTUAL_ENV="$PWD/.venv-torch-$torch_version"
if [[ ! -f "$VIRTUAL_ENV/.installed" ]]; then
    echo "setup: installing torch $torch_version and the test tools into $VIRTUAL_ENV" >&2
    "$(command -v python3 || command -v python)" -m venv "$VIRTUAL_ENV"
    python="$VIRTUAL_ENV/bin/python"
    "$python" -m pip install -qq --no-deps "torch==$torch_version"
    mapfile -t libraries < <("$python" - <<'END'
from importlib.metadata import requires

for line in requires("torch"):
    requirement, _, marker = line.partition(";")
    if "extra" not in marker and not requirement.startswith(("triton", "cuda-bindings")):
        print(requirement.strip())
END
    )
    mapfile -t tools < <("$python" - <<'END'
import tomllib

with open("pyproject.toml", "rb") as stream:
    project = tomllib.load(stream)["project"]
extras = project["optional-dependencies"]
needed = [*project["dependencies"], *extras["cli"], *extras["plot"], *extras["test"]]
for line in needed:
    if not line.startswith(("torch", "dcp-placements", "ruff", "mypy")):
        print(line)
END
    )
    # Torch has a bound of its own for setuptools.
    grep -vE '^(torch|setuptools)==' scripts/constraints.txt >"$VIRTUAL_ENV/constraints.txt"
    # Prints that triton is missing, which no test needs.
    "$python" -m pip install -q -c "$VIRTUAL_ENV/constraints.txt" "${libraries[@]}" "${tools[@]}"
    "$python" -m pip install -qq --no-deps -e .
    "$python" -c 'import torch.distributed.checkpoint'
    touch "$VIRTUAL_ENV/.installed"
fi
export VIRTUAL_ENV
export PATH="$VIRTUAL_ENV/bin:$PATH"
