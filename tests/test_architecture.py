"""The file list tells the story from top to bottom: each file imports only files above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dcp_placements
import fakes

PACKAGE = Path(dcp_placements.__file__).parent
FAKES = Path(fakes.__file__).parent

ORDER = [
    *("errors", "layout", "mesh", "placement", "rules", "interop", "quiet_gc"),
    *("tiling", "digests", "casting", "binding", "optimizer_state", "naming", "renaming", "keys"),
    *("placing", "stacking", "reads", "lazy_items", "shadow_records"),
    *("report", "live", "lint", "provenance", "record", "families", "cut_checks", "options"),
    "save",
    *("request", "shares", "exchange", "load_message", "load_checks", "load_planner"),
    "declaration",
    *("slices", "tensor_record", "tensor_stamp", "storage_table", "safe_pickle", "metadata_file"),
    *("rank_metadata", "file_reads", "copies", "chunk_reads", "storage_writer", "storage_reader"),
    *("preflight",),
    *("presets.preset", "presets.megatron", "presets.megatron_lite", "presets.megatron_core"),
    *("presets.megatron_core_names", "presets.transformers", "presets.veomni", "presets.hub"),
    *("presets",),
    *("offline.directory", "offline.output"),
    *("offline.declared", "offline.safetensors_files", "offline.checkpoint"),
    *("offline.box_reads", "offline.experts", "offline.inspection", "offline.merging"),
    *("offline.structure", "offline.record_checks", "offline.verification"),
    *("offline.comparing", "offline.difference", "offline.cutting", "offline.explanation"),
    *("offline.torch_files", "offline.megatron_files", "offline.megatron_layout"),
    *("offline.chunk_writer", "offline.megatron_model", "offline.megatron_optimizer"),
    *("offline.megatron_dist", "offline.megatron_report", "offline.megatron_parts"),
    *("offline.megatron_import",),
    *("offline.assembly", "offline.selection", "offline.export"),
    *("offline.safetensors_import",),
    *("offline.diagnosis", "offline.rescue"),
    *(
        "offline.rehearsed_record",
        "offline.rehearsal",
        "offline.projection",
        "offline.picture",
        "offline.drawing",
    ),
    *("offline",),
    *("cli.arguments", "cli.printing"),
    *("cli.inspecting", "cli.verifying", "cli.merging", "cli.differing", "cli.explaining"),
    *("cli.megatron", "cli.importing", "cli.exporting"),
    *("cli.rehearsing", "cli.doctoring", "cli.drawing"),
    *("cli.app", "cli"),
    *("__init__", "__main__"),
]
"""Every file of the package. A file stands below all that it imports.

The files of the folder ``save`` have one place together: above all that they import, and below the
load planner and all that is its own.
"""

WITHOUT_TORCH = {"errors", "layout", "mesh", "placement", "rules", "tiling", "naming", "report"}
WITHOUT_TORCH |= {"binding", "optimizer_state", "renaming", "slices", "__init__"}
"""Files that name nothing of torch, so that they can be had without it."""

FAKES_ORDER = [
    "damage",
    "mesh",
    "reference",
    "tensor",
    "world",
    "megatron",
    "megatron_dist",
    "__init__",
]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ``(module, name)`` of every import; those for type checkers alone, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively, in line {node.lineno}"
            for alias in node.names:
                yield node.module or "", alias.name


def module_name(path: Path, root: Path) -> str:
    """Return what a file is called in ``ORDER``; a subpackage's ``__init__`` by the subpackage."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def place(module: str) -> str:
    """Return what stands in ``ORDER`` for a file."""
    return "save" if module.startswith("save.") else module


def file_of(module: str, root: Path) -> Path:
    """Return the file that ``ORDER`` calls so."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def modules_of(path: Path, root: Path) -> set[str]:
    """Return the files of the package at ``root`` that ``path`` imports."""
    package = root.name
    found = set()
    for module, name in imports(path):
        if module == package or module.startswith(f"{package}."):
            inner = module.split(".")[1:]
            if file_of(".".join([*inner, name]), root).exists():
                found.add(".".join([*inner, name]))
            else:
                found.add(".".join(inner) or "__init__")
    return found


def private_names(path: Path) -> list[str]:
    """Return the names of torch that begin with an underscore, wherever they are reached."""
    tree = ast.parse(path.read_text())
    found = []
    of_torch = set()
    for module, name in imports(path):
        if module.split(".")[0] == "torch":
            of_torch.update({"torch", name} - {""})
            parts = [*module.split("."), name]
            found += [".".join(parts)] if any(part.startswith("_") for part in parts) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch.update(
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.split(".")[0] == "torch"
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in of_torch:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Attribute | ast.Constant):
            name = node.attr if isinstance(node, ast.Attribute) else node.value
            if name in {"_local_tensor", "_spec", "_get_root_mesh", "_rank"}:
                found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


MODULES = sorted(module_name(path, PACKAGE) for path in PACKAGE.rglob("*.py"))


def test_every_file_has_its_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted({place(module) for module in MODULES})
    assert sorted(FAKES_ORDER) == sorted(path.stem for path in FAKES.glob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_dependencies_point_one_way(module: str) -> None:
    at = place(module)
    above = set(ORDER[: ORDER.index(at)])
    found = {place(other) for other in modules_of(file_of(module, PACKAGE), PACKAGE)}
    assert found - ({at} if at != module else set()) <= above


def test_files_of_the_save_folder_import_one_way() -> None:
    inside = {module for module in MODULES if module.startswith("save.")}
    graph = {module: modules_of(file_of(module, PACKAGE), PACKAGE) & inside for module in inside}
    assert set(TopologicalSorter(graph).static_order()) == inside


def test_save_and_load_never_import_each_other() -> None:
    for module in MODULES:
        found = modules_of(file_of(module, PACKAGE), PACKAGE)
        if place(module) == "save":
            assert not any(other.startswith("load_") for other in found), module
        if module.startswith("load_"):
            assert not any(place(other) == "save" for other in found), module


@pytest.mark.parametrize("module", FAKES_ORDER)
def test_fakes_import_one_way_and_never_the_tests(module: str) -> None:
    above = set(FAKES_ORDER[: FAKES_ORDER.index(module)])
    assert modules_of(FAKES / f"{module}.py", FAKES) <= above
    assert not any(name.split(".")[0] == "tests" for name, _ in imports(FAKES / f"{module}.py"))


def test_the_package_never_imports_the_fakes() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name, _ in imports(path)} & {"fakes", "tests"}, path


def test_the_oracle_shares_no_code_with_the_library() -> None:
    assert not modules_of(FAKES / "reference.py", PACKAGE)
    assert not modules_of(FAKES / "reference.py", FAKES)


def test_layout_stands_alone() -> None:
    """Integers only: of all there is it needs the standard library."""
    assert {module.split(".")[0] for module, _ in imports(PACKAGE / "layout.py")} == {
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "typing",
    }


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_pure_files_name_nothing_of_torch(module: str) -> None:
    found = {name.split(".")[0] for name, _ in imports(PACKAGE / f"{module}.py")}
    assert "torch" not in found


@pytest.mark.parametrize("module", [module for module in MODULES if module != "interop"])
def test_private_names_of_torch_are_reached_in_interop_only(module: str) -> None:
    assert private_names(file_of(module, PACKAGE)) == []


def test_the_check_for_private_names_finds_those_of_interop() -> None:
    found = private_names(PACKAGE / "interop.py")
    assert "torch.distributed.checkpoint._nested_dict.flatten_state_dict" in found
    assert any(name.endswith("_local_tensor") for name in found)


@pytest.mark.parametrize("library", ["typer", "rich", "matplotlib"])
def test_libraries_of_extras_are_imported_where_they_are_asked_for(library: str) -> None:
    for module in MODULES:
        if module.startswith("cli.") or (library, module) == ("matplotlib", "offline.picture"):
            continue
        found = {name.split(".")[0] for name, _ in imports(file_of(module, PACKAGE))}
        assert library not in found, module


def test_matplotlib_is_imported_for_pictures_only() -> None:
    program = "import sys, dcp_placements.cli.app as app; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_front_door_offers_all_that_it_names() -> None:
    assert dcp_placements.__all__ == sorted(dcp_placements.__all__)
    for name in dcp_placements.__all__:
        assert getattr(dcp_placements, name).__module__.startswith("dcp_placements.")
        assert name in dir(dcp_placements)
    with pytest.raises(AttributeError, match="nothing_such"):
        dcp_placements.nothing_such  # noqa: B018
