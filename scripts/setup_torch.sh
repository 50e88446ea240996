# Sourced by scripts/test after setup.sh: `source scripts/setup_torch.sh VERSION`.
#
# Puts that torch on PYTHONPATH, before the environment's own; all other packages are those of the
# environment. It lies in ~/.cache/dcp-placements (or XDG_CACHE_HOME), once for all clones, with the
# CUDA libraries that its import needs: several GB where a release has no CPU build.
#
# Exit status 69 where torch could not be downloaded, or not in TORCH_DOWNLOAD_SECONDS, if set.

version="$1"
name="torch-$version-py$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
torch="${XDG_CACHE_HOME:-$HOME/.cache}/dcp-placements/$name"

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
    if line.startswith(("nvidia-", "cuda-toolkit")):
        print(line)
END
    if [[ -s "$part/libraries" ]]; then
        download -r "$part/libraries"
    fi
    TMPDIR="$part" python -m pip install -qq --no-index --no-deps --no-compile --target "$part/site" \
        "$part"/wheels/*.whl
    mv -T "$part/site" "$torch"
    rm -rf "$part"
fi
export PYTHONPATH="$torch${PYTHONPATH:+:$PYTHONPATH}"
