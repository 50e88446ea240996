"""The wheel that is built from this tree: everything that an installed package needs is in it."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy of the sources, without network."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("dcp_placements", "fakes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    command = [sys.executable, "-W", "ignore", "-c", build]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = (source / "out").glob("*.whl")
    return zipfile.ZipFile(built)


def test_every_module_is_in_it(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in ROOT.glob("dcp_placements/**/*.py")}
    for path in ROOT.glob("fakes/**/*.py"):
        expected.add(f"dcp_placements/testing/{path.relative_to(ROOT / 'fakes')}")
    names = {name for name in wheel.namelist() if name.endswith(".py")}
    assert names == expected
    assert "dcp_placements/testing/__init__.py" in names


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
    assert metadata["Version"] == project["version"]
    assert f"### {project['version']}" in (ROOT / "README.md").read_text()
    requirements = metadata.get_all("Requires-Dist") or []
    assert {line for line in requirements if ";" not in line} == set(project["dependencies"])
    assert not any("pydantic" in line for line in requirements)
    assert metadata.get_all("Classifier") == project["classifiers"]
