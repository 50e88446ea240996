"""python scripts/build_dist.py OUT [--url URL] [--try]

Writes the sdist of this tree to OUT, and the wheel that is built from the unpacked sdist. The
environment's setuptools builds them; nothing is downloaded.

URL is the address of the repository, such as https://github.com/OWNER/NAME. It becomes the
project's address, and README.md's links to files and images lead there, to the tag of the version:
on the page of a package index a path leads nowhere. A release needs it.

--try makes an empty environment, installs the wheel with what it requires, saves, loads, and asks
its command whether the checkpoint is sound.

Before an upload: `twine check --strict OUT/*` and `check-wheel-contents OUT/*.whl`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def absolute_links(text: str, url: str, tag: str) -> str:
    """Return Markdown whose links to files of this tree lead to a repository.

    >>> absolute_links("[a](LICENSE), [b](#there), ![c](README.md)", "https://x.org/y", "v1")
    '[a](https://x.org/y/blob/v1/LICENSE), [b](#there), ![c](https://x.org/y/raw/v1/README.md)'
    """

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if path.startswith("#") or not (ROOT / path.partition("#")[0]).exists():
            return match[0]
        return f"{image}[{label}]({url}/{'raw' if image else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, text)


def address(source: Path, url: str) -> None:
    """Give the sources in a directory their address."""
    project = source / "pyproject.toml"
    text = project.read_text()
    tag = "v" + tomllib.loads(text)["project"]["version"]
    changes = f"{url}/blob/{tag}/.github/CHANGELOG.md"
    urls = {"Repository": url, "Documentation": f"{url}#readme", "Changelog": changes}
    lines = "".join(f'{name} = "{target}"\n' for name, target in urls.items())
    after = "[project.optional-dependencies]\n"
    project.write_text(text.replace(after, f"[project.urls]\n{lines}\n{after}", 1))
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text(), url, tag))


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` of the sources in a directory."""
    call = f"import sys, setuptools.build_meta as b; print(b.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", call, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"build_dist: no {kind}\n{done.stderr}")
    return out / done.stdout.splitlines()[-1]


SMOKE = """
import torch
import torch.distributed.checkpoint as dcp
from dcp_placements import PlacementFileSystemReader, PlacementFileSystemWriter, Placements

weights = {"w": torch.arange(12.0).view(4, 3)}
writer, reader = PlacementFileSystemWriter("step-1"), PlacementFileSystemReader("step-1")
dcp.save(weights, storage_writer=writer, planner=Placements(None).save_planner(), no_dist=True)
loaded = {"w": torch.zeros(4, 3)}
dcp.load(loaded, storage_reader=reader, planner=Placements(None).load_planner(), no_dist=True)
assert torch.equal(loaded["w"], weights["w"])
"""


def try_out(wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment, and save, load and verify a checkpoint there."""
    venv.create(folder, with_pip=True)
    python, constraints = folder / "bin" / "python", ROOT / "scripts" / "constraints.txt"
    install = [python, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[cli]"]
    verify = [folder / "bin" / "dcp-placements", "verify", "step-1", "--contents"]
    for command in install, [python, "-I", "-c", SMOKE], verify:
        if subprocess.run(command, cwd=folder, check=False).returncode:
            raise SystemExit(f"build_dist: {wheel.name} does not work in an empty environment")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--try", action="store_true", dest="is_tried")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        for folder in ("dcp_placements", "fakes"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, source)
        if options.url:
            address(source, options.url.rstrip("/"))
        sdist = build("sdist", source, out)
        with tarfile.open(sdist) as archive:
            # Python before 3.11.4 has no filters.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(temporary)
        wheel = build("wheel", Path(temporary) / sdist.name.removesuffix(".tar.gz"), out)
        if options.is_tried:
            try_out(wheel, Path(temporary) / "env")
    print(sdist, wheel, sep="\n")


if __name__ == "__main__":
    main()
