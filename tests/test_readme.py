"""README.md and the guides are what happens: code runs, output is printed, tables hold.

A ``python`` block runs after the ones before it in its section. Where the next block is ``text``,
that is what it prints. One marked ``torchrun`` is a program for two real ranks. One with a file's
name is that file; a program of its own test if it is the only block of its section. A ``console``
block is commands after ``$`` and what each prints.

``python tests/test_readme.py [PAGE ...]`` writes what is printed into the pages, for a message that
changed on purpose; what two ranks print is to be written by hand.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_placements
from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    RaggedShard,
    pages,
)
from dcp_placements.bind.place import place
from dcp_placements.cli import main
from dcp_placements.cli.app import app
from dcp_placements.testing import cut
from tests.torchrun import forked

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PACKAGE = ROOT / "dcp_placements"
COMMANDS = PACKAGE / "cli" / "README.md"
GUIDES = [*sorted(PACKAGE.rglob("*.md")), *sorted((ROOT / "fakes").glob("*.md"))]
PAGES = [README, *GUIDES, ROOT / "scripts" / "README.md", *sorted((ROOT / ".github").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The file.
        section: The heading above it.
        kind: What stands behind the opening fence.
        line: Number of its first line, from 0.
        text: What is inside.
    """

    page: Path
    section: str
    kind: str
    line: int
    text: str

    @property
    def place(self) -> tuple[Path, int]:
        return self.page, self.line


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found = []
    section, kind, start = "", None, 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        if kind is None and line.startswith("## "):
            section = line.removeprefix("## ")
        elif kind is None and line.startswith("```"):
            kind, start = line.removeprefix("```"), number + 1
        elif kind is not None and line == "```":
            text = "\n".join(lines[start:number]) + "\n"
            found.append(Block(page, section, kind, start, text))
            kind = None
    assert kind is None, f"a block of {page} is never closed"
    return found


GLOO_AT_EXIT = "terminate called without an active exception"

BLOCKS = [block for page in PAGES for block in read_blocks(page)]
PROMISED = {
    code.place: output.text
    for code, output in pairwise(BLOCKS)
    if output.kind == "text" and (output.page, output.section) == (code.page, code.section)
}
"""What a block prints, by its place; of a console block, all of it."""

PROMISED |= {block.place: block.text for block in BLOCKS if block.kind == "console"}

SECTIONS = list(dict.fromkeys((b.page, b.section) for b in BLOCKS if b.kind == "python"))
PROGRAMS = [block for block in BLOCKS if block.kind == "python torchrun"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_table(section: str, page: Path = README, number: int = 0) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    lines = page.read_text().splitlines()
    start = lines.index(f"## {section}")
    tables: list[list[list[str]]] = []
    inside = False
    for line in lines[start + 1 :]:
        if line.startswith("## "):
            break
        if line.startswith("|") and not inside:
            tables.append([])
        inside = line.startswith("|")
        if inside:
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            tables[-1].append([cell.strip() for cell in cells])
    return tables[number][2:]


def code_of(cell: str) -> str:
    return cell.strip("`")


def run_section(page: Path, section: str, folder: Path) -> dict[tuple[Path, int], str]:
    """Return what each block of a section prints, by its place; run in ``folder``."""
    printed = {}
    namespace: dict[str, Any] = {"__name__": "readme"}
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        for block in BLOCKS:
            if (block.page, block.section) != (page, section):
                continue
            if block.kind.startswith("python ") and block.kind.endswith(".py"):
                Path(block.kind.removeprefix("python ")).write_text(block.text)
            elif block.kind == "console":
                printed[block.place] = run_console(block.text)
            elif block.kind == "python":
                # Empty lines in front, so that a traceback shows the lines of the page.
                program = compile("\n" * block.line + block.text, str(page), "exec")
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(program, namespace)
                printed[block.place] = output.getvalue()
    return printed


def run_console(text: str) -> str:
    """Run the commands of a console block; return the block with what they print."""
    lines = []
    for line in text.splitlines():
        if line.startswith("$ "):
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert program == "dcp-placements", line
            with contextlib.redirect_stdout(io.StringIO()) as output:
                main(arguments)
            lines += [line, *output.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("page", "section"), SECTIONS, ids=lambda value: str(value)[-40:])
def test_blocks_run_and_print_what_stands_below(page: Path, section: str, tmp_path: Path) -> None:
    for at, printed in run_section(page, section, tmp_path).items():
        assert printed == PROMISED.get(at, "")


@pytest.mark.dist
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: name_of(block.page))
def test_programs_run_on_two_ranks(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.text)
    done = forked(program, ranks=2, cwd=tmp_path)
    # Now and then a gloo thread of torch aborts a process that is about to exit, also after stock
    # saves and with the group destroyed; what the program did is then done.
    assert done.returncode == 0 or GLOO_AT_EXIT in done.stderr, done.stderr
    # Gloo of torch 2.10 prints a line per rank.
    printed = re.sub(r"(?m)^\[Gloo\].*\n", "", done.stdout)
    assert printed == PROMISED.get(block.place, "")
    if block.page != README:
        return
    found = {"experts.w1": torch.full((8, 3), 7.0)}
    planner = dcp.DefaultLoadPlanner()
    dcp.load(found, checkpoint_id=tmp_path / "step-1", planner=planner, no_dist=True)
    assert found["experts.w1"].tolist() == [[0.0] * 3] * 4 + [[1.0] * 3] * 4


@pytest.mark.parametrize(
    "row",
    read_table("Placements", PACKAGE / "rules" / "README.md"),
    ids=lambda row: code_of(row[0]),
)
def test_placements_keep_the_rows_of_the_table(row: list[str]) -> None:
    names = (FlatShard, FusedShard, IndexShard, RaggedShard, Replicate, Shard, _StridedShard)
    placement = eval(code_of(row[0]), {name.__name__: name for name in names})
    for position, cell in enumerate(row[1:]):
        if not cell:
            continue
        rows = [int(number) for number in cell.split()]
        whole = torch.arange(10)
        assert cut(whole, [placement], (2,), (position,)).tolist() == rows
        mesh = MeshCoordinate(("tp",), (2,), (position,))
        rules = PlacementRules({"w": CheckpointPlacement(mesh, [placement], global_shape=(10,))})
        placing = place({"w": torch.empty(len(rows))}, rules)
        assert not placing.faults
        found = [
            whole[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
            for chunk in placing.placed["w"].place.chunks
        ]
        assert torch.cat(found).tolist() == rows


@pytest.mark.parametrize(
    ("folder", "planner"), [("save", PlacementSavePlanner), ("load", PlacementLoadPlanner)]
)
def test_option_tables_name_every_option_and_its_default(folder: str, planner: type) -> None:
    table = read_table("Options", PACKAGE / folder / "README.md")
    options = {code_of(row[0]): code_of(row[1]) for row in table}
    parameters = inspect.signature(planner).parameters
    wanted = {name: repr(parameter.default) for name, parameter in parameters.items()}
    assert {name: default.replace('"', "'") for name, default in options.items()} == wanted
    assert list(options) == list(wanted)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("name", [name for name in vars(pages) if name.endswith("_PAGE")])
def test_a_page_that_a_message_names_is_there(name: str) -> None:
    file, _, anchor = getattr(pages, name).removeprefix("page:").strip().partition("#")
    assert (ROOT / file).is_file()
    assert not anchor or anchor in anchors_of(ROOT / file)
    uses = [path for path in PACKAGE.rglob("*.py") if name in path.read_text()]
    assert len(uses) >= 2, "no message names it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_have_no_gaps(page: Path) -> None:
    text = page.read_text()
    for rest in re.findall(r"^\|.*\n\n(\|.*\n.*)$", text, re.MULTILINE):
        assert "\n| ---" in rest, rest


def test_every_public_name_has_a_line_with_a_link() -> None:
    text = "\n".join(
        cell for n in (0, 1) for row in read_table("Public names", number=n) for cell in row
    )
    for name in dcp_placements.__all__:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


def named_in_files() -> list[tuple[Path, str]]:
    """Return every name that stands behind a link to a file, with the file."""
    return [
        (page.parent / link, name)
        for page in GUIDES
        for link, names in re.findall(r"\]\((\S+\.py)\)((?:,? `[\w.]+`)+)", page.read_text())
        for name in re.findall(r"[\w.]+", names)
    ]


@pytest.mark.parametrize(("file", "name"), named_in_files(), ids=lambda value: Path(value).name)
def test_names_behind_a_link_are_in_the_file(file: Path, name: str) -> None:
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    for part in name.split("."):
        nodes = [
            inner for node in nodes for inner in ast.walk(node) if part in names_bound_by(inner)
        ]
    assert nodes


def names_bound_by(node: ast.AST) -> list[str]:
    """Return the name of a function, class or constant."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_command_table_names_every_command() -> None:
    named = {code_of(row[0]).split()[0] for row in read_table("The command line", COMMANDS)}
    assert named == set(app.commands)


@pytest.fixture(scope="module")
def walk_through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walk")
    run_section(COMMANDS, "The command line", folder)
    return folder


def test_picture_of_the_walk_through_is_what_is_drawn(walk_through: Path) -> None:
    shown = (ROOT / "scripts" / "figures" / "experts.svg").read_text()
    assert svg_facts((walk_through / "experts.svg").read_text()) == svg_facts(shown)


def svg_facts(svg: str) -> list[str]:
    """Return texts and colours of a picture, which are the same wherever letters come to lie."""
    return sorted(re.findall(r"<text[^>]*>([^<]*)</text>|fill: (#\w+)", svg))


def test_scripts_that_are_named_exist() -> None:
    for page in PAGES:
        for name in sorted(set(re.findall(r"`(scripts/\w+)`", page.read_text()))):
            assert (ROOT / name).is_file(), name
    for name in re.findall(r"(?:tests|scripts)/[\w/]+(?:\.\w+)?", (ROOT / ".ci/run").read_text()):
        assert (ROOT / name).is_file(), name


def rewrite(pages: Sequence[Path]) -> None:
    """Put what the blocks print into the pages."""
    printed: dict[tuple[Path, int], str] = {}
    for page, section in SECTIONS:
        if page not in pages:
            continue
        with tempfile.TemporaryDirectory() as folder:
            printed |= run_section(page, section, Path(folder))
            for picture in Path(folder).glob("*.svg"):
                shutil.copy(picture, ROOT / "scripts" / "figures" / picture.name)
    blocks = [
        (text, printed[code.place])
        for code, text in pairwise(BLOCKS)
        if code.kind == "python" and code.place in printed and code.place in PROMISED
    ]
    consoles = [one for one in BLOCKS if one.kind == "console" and one.place in printed]
    blocks += [(block, printed[block.place]) for block in consoles]
    for block, text in sorted(blocks, key=lambda one: -one[0].line):
        lines = block.page.read_text().splitlines()
        stop = block.line + block.text.count("\n")
        lines[block.line : stop] = text.splitlines()
        block.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    rewrite([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
