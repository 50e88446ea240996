"""The folders of the package stand in one order, and each imports only from those below it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import dcp_placements
from dcp_placements import testing

PACKAGE = Path(dcp_placements.__file__).parent
FAKES = Path(testing.__file__).parent

FLOORS = (
    {"short_text", "errors", "report", "_torch", "items", "pages"},
    {"layout"},
    {"rules"},
    {"names"},
    {"bind"},
    {"storage"},
    {"table"},
    {"save", "load"},
    {"exchange"},
    {"engines"},
    {"declaration", "adoption"},
    {"installation", "advice", "program_meshes"},
    {"preflight"},
    {"presets"},
    {"offline"},
    {"program_watch"},
    {"run"},
    {"convert"},
    {"cli"},
)
"""Folders and modules of the package's root, low to high. Those of one floor, ``save`` and ``load``
among them, import nothing of each other, but for the modules of the lowest."""

OPTIONAL = {("load/planner.py", "exchange"), ("save/coordinator.py", "advice")}
"""What a file imports inside a function, where an option or a refusal asks for it."""

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """Return ``(module, name)`` of every import; those for type checkers alone, too."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or path.parent == FAKES, f"{path.name}:{node.lineno} is relative"
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def rooms_of(path: Path) -> set[str]:
    """Return the folders, or modules of the root, that a file imports from."""
    found = set()
    for module, name in imports(path):
        parts = [*module.split("."), name]
        if parts[0] == PACKAGE.name and parts[1] != "__version__":
            found.add(parts[1])
    return found


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def private_names(path: Path) -> list[str]:
    """Return the names of torch that begin with an underscore, wherever they are reached."""
    found = []
    tree = nodes(path)
    of_torch = set()
    for module, name in imports(path):
        if module.split(".")[0] == "torch":
            of_torch.update({"torch", name} - {""})
            parts = [*module.split("."), name]
            found += [".".join(parts)] if any(part.startswith("_") for part in parts) else []
    for node in tree:
        if isinstance(node, ast.Import):
            of_torch.update(
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.split(".")[0] == "torch"
            )
    for node in tree:
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


def test_every_folder_has_its_place_in_the_order() -> None:
    rooms = {path.split("/")[0].removesuffix(".py") for path in FILES}
    assert rooms - {"__init__", "__main__"} == set.union(*FLOORS)


def test_dependencies_point_one_way() -> None:
    for file in FILES:
        room = file.split("/")[0].removesuffix(".py")
        if room in {"__init__", "__main__"}:
            continue
        here = floor_of(room)
        for other in rooms_of(PACKAGE / file) - {room}:
            if (file, other) in OPTIONAL:
                continue
            assert floor_of(other) < here or here == 0, f"{file} imports from {other}"


def modules_of(path: Path) -> set[str]:
    """Return the files of the package that a file imports from, also for types or in a function."""
    names = [f"{module}.{name}" for module, name in imports(path)]
    names += [module for module, _ in imports(path)]
    files = {name.replace(".", "/").removeprefix(f"{PACKAGE.name}/") + ".py" for name in names}
    return files & set(FILES)


def test_no_module_imports_another_in_a_circle() -> None:
    imported = {file: modules_of(PACKAGE / file) for file in FILES}
    assert imported["load/planner.py"] >= {"load/request.py", "exchange/sending.py", "items.py"}
    # Again and again those go that import none of the rest; what is left is in a circle.
    rest = set(FILES)
    while gone := {file for file in rest if not imported[file] & rest}:
        rest -= gone
    assert rest == set()


def test_the_fakes_never_import_the_tests_nor_the_package_them() -> None:
    for path in FAKES.glob("*.py"):
        assert not any(name.split(".")[0] == "tests" for name, _ in imports(path)), path
    for path in PACKAGE.rglob("*.py"):
        assert not rooms_of(path) & {"testing"}, path
        assert not any(name.split(".")[0] == "tests" for name, _ in imports(path)), path


def test_the_oracle_shares_no_code_with_the_library() -> None:
    names = {name.split(".")[0] for name, _ in imports(FAKES / "reference.py")}
    assert "dcp_placements" not in names


def test_every_folder_is_in_the_wheel() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"dcp_placements.testing"}
    assert set(settings["tool"]["setuptools"]["packages"]) == expected


def test_the_layout_algebra_is_integers_only() -> None:
    found = {
        (module.split(".")[0], path.name)
        for path in (PACKAGE / "layout").glob("*.py")
        for module, _ in imports(path)
    }
    assert {one for one in found if one[0] in {"torch", "numpy"}} == {("numpy", "boxes.py")}


def test_private_names_of_torch_are_reached_in_one_module() -> None:
    found = {file: private_names(PACKAGE / file) for file in FILES if file != "_torch.py"}
    assert {file: names for file, names in found.items() if names} == {}


def test_the_check_for_private_names_finds_those_that_are_there() -> None:
    found = private_names(PACKAGE / "_torch.py")
    assert "torch.distributed.checkpoint._nested_dict.flatten_state_dict" in found
    assert any(name.endswith("_local_tensor") for name in found)


@pytest.mark.parametrize("library", ["click", "rich", "matplotlib", "torch_checkpointing"])
def test_libraries_of_extras_are_imported_where_they_are_asked_for(library: str) -> None:
    for file in FILES:
        is_picture = library == "matplotlib" and file.endswith("picture.py")
        if file.startswith("cli/") or is_picture or file == "engines/resharder.py":
            continue
        found = {name.split(".")[0] for name, _ in imports(PACKAGE / file)}
        assert library not in found, file


def test_what_few_need_is_imported_by_those_who_ask_for_it() -> None:
    program = """
import sys
from dcp_placements import offline
functions = "inspect inspect_tensor shapes verify diff diagnose draw stock_metadata open_source"
for name in functions.split():
    getattr(offline, name)
for folder in ("dcp_placements.save", "dcp_placements.load", "dcp_placements.engines"):
    assert not any(name.startswith(folder) for name in sys.modules), folder
import dcp_placements.save.planner, dcp_placements.load.planner
assert not {"click", "rich"} & set(sys.modules)
for folder in ("dcp_placements.presets", "dcp_placements.exchange", "dcp_placements.advice"):
    assert not any(name.startswith(folder) for name in sys.modules)
from dcp_placements import presets
assert presets.megatron_lite.__module__ == "dcp_placements.presets.megatron_lite"
import dcp_placements.cli.app, dcp_placements.offline.picture
assert not {"transformers", "megatron", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_front_door_offers_all_that_it_names() -> None:
    assert dcp_placements.__all__ == sorted(dcp_placements.__all__)
    for name in dcp_placements.__all__:
        assert getattr(dcp_placements, name).__module__.startswith("dcp_placements.")
        assert name in dir(dcp_placements)
    with pytest.raises(AttributeError, match="nothing_such"):
        dcp_placements.nothing_such  # noqa: B018


def test_nothing_is_told_apart_by_where_it_lies_in_memory() -> None:
    """An address is a key of nothing: when its object is gone, another one may lie there."""
    for file in FILES:
        found = [node for node in nodes(PACKAGE / file) if isinstance(node, ast.Name)]
        assert [node.lineno for node in found if node.id == "id"] == [], file


PAIRS = {"planner"}
"""Modules that ``save`` and ``load`` both have: each the other's counterpart."""


def names_of(path: Path) -> list[str]:
    """Return the classes, type aliases and constants of a module; a ``TypeVar`` is its own."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            made_by = ast.unparse(node.value) if node.value else ""
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not made_by.startswith(("TypeVar(", "logging.getLogger(")):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("__")]


def test_one_name_is_one_thing() -> None:
    """No class, type alias or constant stands in two modules, and no two modules share a name."""
    homes: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    for file in FILES:
        modules.setdefault(Path(file).stem, []).append(file)
        for name in names_of(PACKAGE / file):
            homes.setdefault(name, []).append(file)
    assert {name: of for name, of in homes.items() if len(of) > 1} == {}
    twice = {name for name, of in modules.items() if len(of) > 1 and not name.startswith("__")}
    assert twice == PAIRS


VAGUE = {"one", "at", "found", "lies", "alike", "taken"}
"""Words that fit thirty different values, and so name none of them."""


@pytest.mark.parametrize("file", FILES)
def test_no_value_has_a_name_that_fits_any_other(file: str) -> None:
    bound = {
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes(PACKAGE / file)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    # ``contiguous(counts, at=)`` is public.
    assert bound & VAGUE == ({"at"} if file == "names/renames.py" else set())
