"""The sdist and the wheel of this tree: complete, and enough where only its dependencies are."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dcp_placements import __version__, pages

ROOT = Path(__file__).parent.parent
URL = "https://example.org/owner/dcp_placements"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both, with an address, without network."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, ROOT / "scripts" / "build_dist.py", out, "--url", URL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_module_is_in_it(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in ROOT.glob("dcp_placements/**/*.py")}
    for path in ROOT.glob("fakes/**/*.py"):
        expected.add(f"dcp_placements/testing/{path.relative_to(ROOT / 'fakes')}")
    names = {name for name in wheel.namelist() if name.endswith(".py")}
    assert names == expected
    assert "dcp_placements/testing/__init__.py" in names


def test_pages_that_messages_name_are_in_it(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for name in (name for name in vars(pages) if name.endswith("_PAGE")):
        assert getattr(pages, name).split()[-1].partition("#")[0] in names
    assert {f"dcp_placements/guides/{p.name}" for p in ROOT.glob("dcp_placements/guides/*")} < names


def test_licence_types_and_entry_point_are_in_it(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "dcp_placements/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "dcp-placements = dcp_placements.cli:main" in wheel.read(entries).decode()


def test_its_metadata_are_those_of_the_project(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Version"] == project["version"] == __version__
    assert f"## {project['version']}" in (ROOT / ".github" / "CHANGELOG.md").read_text()
    requirements = metadata.get_all("Requires-Dist") or []
    needed = {str(Requirement(line)) for line in requirements if "extra ==" not in line}
    assert needed == {str(Requirement(line)) for line in project["dependencies"]}
    assert not any("pydantic" in line for line in requirements)
    assert metadata.get_all("Classifier") == project["classifiers"]
    assert metadata["License-Expression"] == project["license"]
    assert f"Repository, {URL}" in (metadata.get_all("Project-URL") or [])


def test_links_of_its_page_lead_to_the_repository(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    page = email.message_from_bytes(wheel.read(path)).get_payload()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    paths = [t for t in re.findall(r"\]\(([^)\s]+)\)", readme) if t[0] != "#" and "://" not in t]
    assert paths
    for target in paths:
        assert f"]({target})" not in page
        kind = "raw" if target.endswith((".svg", ".png")) else "blob"
        assert f"]({URL}/{kind}/v{project['version']}/{target})" in page


def test_the_sdist_has_the_sources_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    found = {name for name in names if name.endswith(".py")}
    sources = {*ROOT.glob("dcp_placements/**/*.py"), *ROOT.glob("fakes/**/*.py")}
    assert found == {str(path.relative_to(ROOT)) for path in sources}
    assert {"LICENSE", "README.md", "pyproject.toml", "dcp_placements/py.typed"} <= names


def distributions(requirements: list[str], extra: str = "") -> set[str]:
    """Return the names of installed distributions that requirements lead to."""
    found: set[str] = set()
    waiting = [(line, extra) for line in requirements]
    while waiting:
        line, wanted = waiting.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": wanted}):
            continue
        if requirement.name not in found:
            found.add(requirement.name)
            try:
                needed = importlib.metadata.requires(requirement.name) or []
            except importlib.metadata.PackageNotFoundError as error:
                pytest.skip(f"needs {error.name}, which torch requires, installed")
            waiting += [(line, e) for line in needed for e in ("", *requirement.extras)]
    return found


def environment(path: Path, wheel: zipfile.ZipFile, extra: str) -> Path:
    """Return the programs of an environment that has the wheel and what it requires, no more."""
    venv.create(path, symlinks=True)
    (site,) = path.glob("lib/python*/site-packages")
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    for distribution in distributions(metadata.get_all("Requires-Dist") or [], extra):
        files = importlib.metadata.files(distribution) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = importlib.metadata.distribution(distribution).locate_file(top)
            if not (site / top).exists():
                (site / top).symlink_to(str(target))
    programs = path / "bin"
    command = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    command += ["--no-index", "--no-deps", "-q", str(wheel.filename)]
    subprocess.run(command, check=True)
    return programs


def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DCP_TREE")}
    return subprocess.run(command, capture_output=True, text=True, env=clean, check=False)


def test_it_is_enough_with_its_dependencies_alone(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    programs = environment(tmp_path / "env", wheel, "")
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in wheel.namelist()
        if name.endswith(".py")
        and not name.startswith(("dcp_placements/cli/", "dcp_placements/__m"))
        and name != "dcp_placements/engines/resharder.py"  # imports an engine
    ]
    imports = f"import importlib; [importlib.import_module(m) for m in {modules}]"
    done = call(programs / "python", "-I", "-c", imports)
    assert done.returncode == 0, done.stderr
    done = call(programs / "dcp-placements", "--version")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'dcp-placements[cli]'" in done.stderr


def test_its_command_runs_with_the_extra_cli(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    programs = environment(tmp_path / "env", wheel, "cli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = call(programs / "dcp-placements", "--version")
    assert done.returncode == 0, done.stderr
    assert project["version"] in done.stdout
    assert call(programs / "python", "-I", "-c", "import pydantic").returncode == 1
