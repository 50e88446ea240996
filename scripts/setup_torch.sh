# Sourced by scripts/test: `source scripts/setup_torch.sh VERSION`.
#
# Leaves the working directory at the repository's root and PATH at .venv-torch-VERSION-pyX.Y, made
# with the python3 on PATH, which has the package installed editable with the extra test-core, under
# scripts/constraints.txt but for torch. Tests that need more (frameworks, S3) are skipped.
#
# That torch lies in ~/.cache/dcp-placements (or XDG_CACHE_HOME), once for all clones, with the
# libraries that its import needs: several GB where a release has no CPU build. Triton is left out.
#
# Exit status 69 where torch could not be downloaded, or not in TORCH_DOWNLOAD_SECONDS, if set.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

version="$1"
name="torch-$version-py$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
export VIRTUAL_ENV="$PWD/.venv-$name"
torch="${XDG_CACHE_HOME:-$HOME/.cache}/dcp-placements/$name"
if [[ ! -x "$VIRTUAL_ENV/bin/pip" ]]; then
    python3 -m venv "$VIRTUAL_ENV"
fi
export PATH="$VIRTUAL_ENV/bin:$PATH"

download() {
    local limit="${TORCH_DOWNLOAD_SECONDS:-}"
    if ! TMPDIR="$part" timeout "${limit:-0}" \
        python -m pip download -qq -d "$part/wheels" "$@"; then
        echo "setup: torch $version cannot be downloaded here${limit:+ in $limit s}" >&2
        rm -rf "$part"
        exit 69
    fi
}

if [[ ! -d "$torch" ]]; then
    echo "setup: installing torch $version into $torch" >&2
    mkdir -p "$(dirname "$torch")"
    part="$(mktemp -d "$torch.XXXXXX")"
    download --no-deps "torch==$version"
    python - "$part"/wheels/torch-*.whl >"$part/libraries" <<'END'
import sys
from importlib.metadata import distributions

(torch,) = distributions(name="torch", path=sys.argv[1:])
for line in torch.requires:
    if "extra ==" not in line and not line.startswith(("triton", "cuda-bindings")):
        print(line)
END
    download -r "$part/libraries"
    TMPDIR="$part" python -m pip install -qq --no-index --no-deps --no-compile --target "$part/site" \
        "$part"/wheels/*.whl
    # Else pip reports at every later install that they are missing.
    sed -i -E '/^Requires-Dist: (triton|cuda-bindings)/d' "$part"/site/torch-*.dist-info/METADATA
    mv -T "$part/site" "$torch"
    rm -rf "$part"
fi

stamp="$VIRTUAL_ENV/.dcp-placements-installed"
if ! cat pyproject.toml scripts/constraints.txt | cmp -s - "$stamp"; then
    echo "setup: installing dcp-placements and its test tools into $VIRTUAL_ENV" >&2
    echo "$torch" >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    # Torch may have a bound of its own for setuptools; the wheel is built with this one.
    grep -vE '^(torch|setuptools)==' scripts/constraints.txt >"$VIRTUAL_ENV/constraints.txt"
    python -m pip install -qq --no-compile -c "$VIRTUAL_ENV/constraints.txt" -e '.[test-core]' \
        'setuptools>=77'
    cat pyproject.toml scripts/constraints.txt >"$stamp"
fi
