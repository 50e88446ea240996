"""The documents of ``--json`` have the keys that the guide lists, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dcp_placements.cli
from dcp_placements.offline import to_json
from tests.offline_scenes import Run, save_hugging_face, save_sharded

GUIDE = (Path(dcp_placements.cli.__file__).parent / "README.md").read_text()
RULES = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=2")

EXPERT = "layers.0.experts.w1"

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "ckpt"),
    "inspect CKPT FQN": ("inspect", "ckpt", "scale"),
    "verify": ("verify", "ckpt"),
    "diff": ("diff", "ckpt", "other"),
    "rehearse": ("rehearse", "ckpt", *RULES, "--fqn", "experts.**"),
    "doctor": ("doctor", "ckpt"),
    "draw": ("draw", "ckpt", "-o", "a.png"),
    "stock-metadata": ("stock-metadata", "ckpt"),
    "export": ("export", "ckpt", "hf"),
    "import": ("import", "hub", "dcp"),
    "reshard": ("reshard", "ckpt", "ep2", *RULES),
}


def table(heading: str) -> dict[str, str]:
    """Return a table of two columns of the guide's section of the keys, by its first column."""
    section = GUIDE.partition("\n## Keys\n")[2].partition("\n## ")[0]
    rows = section.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows}


def keys_of(cell: str) -> list[set[str]]:
    return [set(keys.split()) for keys in re.findall(r"`([^`]+)`", cell)]


# What is inside of documents: the cell of the guide, and how a part is reached.
PARTS: dict[str, list[tuple[str, str]]] = {
    "`inspect`: `tensors` by key": [("inspect", "tensors scale")],
    "`inspect`: `groups`": [("inspect", "groups 0")],
    "`inspect`: `objects` by key, `files` by name": [
        ("inspect", "objects step"),
        ("inspect", "files .metadata"),
    ],
    "`inspect`: `cuts`": [("inspect", "cuts 0")],
    "`inspect CKPT FQN`: `chunks`": [("inspect CKPT FQN", "chunks 0")],
    "`rehearse`: `ranks`, `requests`": [("rehearse", "ranks 0"), ("rehearse", "requests 0")],
    "`doctor`: `tensors` by key": [("doctor", f"tensors {EXPERT}")],
    "`doctor`: `lost`": [("doctor whole", "lost 0")],
    "`verify`: `faults`": [("verify broken", "faults 0")],
    "`diff`: `families`": [("diff", "families 0")],
    "`diff`: `differences`": [("diff", "differences 0")],
    "`diff`: `first` of a difference": [("diff", "differences 0 first")],
}


def test_the_documents_have_the_keys_that_the_guide_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    save_sharded(Path("ckpt"))
    save_sharded(Path("broken"))
    next(Path("broken").glob("__0_*")).unlink()
    save_sharded(Path("other"), add=1)
    save_hugging_face(Path("hub"), {"w": torch.arange(4.0)})
    documents = {name: run(*command, "--json").json for name, command in COMMANDS.items()}
    listed = {row.strip("`"): keys_of(cell)[0] for row, cell in table("command | keys").items()}
    assert listed.pop("megatron"), "its document has a test beside Megatron's files"
    Path("model.py").write_text("def shapes(): return {'scale': (2,)}")
    whole = ("doctor", "ckpt", "--whole", "model:shapes")
    documents["doctor whole"] = run(*whole, "--json").json
    documents["verify broken"] = run("verify", "broken", "--json").json
    assert listed == {name: set(documents[name]) for name in COMMANDS}
    inside = table("| each has")
    assert inside.keys() == PARTS.keys()
    for row, parts in PARTS.items():
        for (name, path), keys in zip(parts, keys_of(inside[row]), strict=True):
            part = documents[name]
            for step in path.split():
                part = part[int(step) if isinstance(part, list) else step]
            assert set(part) == keys, row


def test_a_result_without_a_verdict_of_its_own_is_plain() -> None:
    assert to_json({"a": (1, float("inf"))}) == {"a": [1, "inf"]}
