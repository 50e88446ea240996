"""``Placements.resharder()`` under the released ``torch_checkpointing``, on real ranks.

The truth is cut by plain slicing in ``tests/ranks/engine_worker.py``. The engine's own resharder
loads side by side.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dcp_placements import PlacementError, offline
from tests.torchrun import forked, tail
from tests.versions import meshes_say_their_rank

pytest.importorskip("torch_checkpointing")

WORKER = Path(__file__).parents[1] / "ranks" / "engine_worker.py"
SAVED = "ep=2,fsdp=2"
WORLDS = {
    4: (SAVED, "ep=4,fsdp=1", "ep=1,fsdp=4", "rep=2,ep=1,fsdp=2", "rep=2,ep=2,fsdp=1"),
    2: ("ep=2,fsdp=1", "ep=1,fsdp=2"),
}
SAVES = [f"save:{kind}:{SAVED}" for kind in ("ours", "theirs", "conflict", "no_rule", "bad_shape")]
REFUSED = {
    f"load:ours:{SAVED}:theirs": "2 different contents on 2 ranks that claim to be replicas",
    f"load:source_of_8:{SAVED}:theirs": "was saved by 4 ranks, and axes= is a mesh of 8",
    "load:no_rule:ep=4,fsdp=1:ours": "does this load lack a rule for it, on an axis of size 4?",
    "load:no_rename:ep=4,fsdp=1:ours": "rename= was forgotten in this load",
    "load:other_rule:ep=4,fsdp=1:ours": "cuts it by 'ep' in another way than the save did",
    f"load:ours:{SAVED}:conflict": "model.router: 2 different contents on 2 ranks",
    f"load:ours:{SAVED}:no_rule": "model.experts.w1: 2 different contents on 2 ranks",
    f"load:theirs:{SAVED}:ours": "was saved with Placements.resharder(), and is loaded with",
    f"save:bad_shape:{SAVED}": "rank 1 cannot be placed in the checkpoint",
    f"save:in_tuple:{SAVED}": "model.pair: is an object with a DTensor in it",
}

Seen = dict[str, list[dict[str, Any]]]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the checkpoints are."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def seen(out: Path) -> Seen:
    """Return by scenario what each rank saw."""
    found: Seen = {}
    for ranks, worlds in WORLDS.items():
        loads = [
            f"load:{kind}"
            for world in worlds
            for kind in (f"ours:{world}", f"source:{world}:theirs", f"theirs:{world}")
        ]
        scenarios = [*SAVES, *loads, *REFUSED] if ranks == 4 else loads
        scenarios = list(dict.fromkeys(scenarios))
        scenarios += ["load:restricted:ep=4,fsdp=1:ours"] if ranks == 4 else []
        done = forked(WORKER, out, *scenarios, ranks=ranks)
        assert done.returncode == 0, tail(done)
        of_ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
        found |= {scenario: [one[scenario] for one in of_ranks] for scenario in scenarios}
    return found


@pytest.mark.parametrize("world", [*WORLDS[4], *WORLDS[2]])
@pytest.mark.parametrize("kind", ["ours", "source"])
def test_every_rank_gets_what_plain_slicing_cuts(seen: Seen, kind: str, world: str) -> None:
    facts = seen[f"load:{kind}:{world}" + (":theirs" if kind == "source" else "")]
    assert [(one["wrong"], one["refused"], one["warnings"]) for one in facts] == [
        ([], {}, [])
    ] * len(facts)


def test_its_own_resharder_is_right_in_the_topology_that_saved_alone(seen: Seen) -> None:
    wrong = {
        world: sum(len(one["wrong"]) for one in seen[f"load:theirs:{world}"])
        for world in (*WORLDS[4], *WORLDS[2])
    }
    assert wrong.pop(SAVED) == 0
    assert min(wrong.values()) > 5, wrong
    assert not any(one["refused"] for world in wrong for one in seen[f"load:theirs:{world}"])


def test_objects_of_plain_values_are_restored_from_restricted_files(seen: Seen) -> None:
    facts = seen["load:restricted:ep=4,fsdp=1:ours"]
    assert [(one["wrong"], one["refused"]) for one in facts] == [([], {})] * 4


@pytest.mark.parametrize("scenario", REFUSED)
def test_what_is_declared_wrongly_is_refused_on_every_rank(seen: Seen, scenario: str) -> None:
    for one in seen[scenario]:
        (text,) = one["refused"].values()
        assert REFUSED[scenario] in text
        assert ("source= and axes=" in text) == (scenario == f"load:ours:{SAVED}:theirs")


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.usefixtures("seen")
def test_such_a_directory_is_converted_to_whole_tensors(
    out: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(WORKER.parent)
    worker = import_module("engine_worker")
    declared = {} if kind == "ours" else {"rules": worker.saved_by, "axes": {"ep": 2, "fsdp": 2}}

    def source() -> Any:
        return offline.open_source(out / kind, **declared)

    offline.import_checkpoint(source(), tmp_path / "dcp")
    stored = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    found = {key: torch.zeros(tuple(one.size)) for key, one in stored.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for key, whole in worker.truth().items():
        assert torch.equal(found[f"model.{key}"], whole), key
        if key != "scale":
            assert torch.equal(found[f"optimizer.state.{key}.exp_avg"], whole * 2), key
    offline.export_safetensors(source(), tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    exported = load_file(file)
    assert exported.keys() == worker.truth().keys()
    assert all(torch.equal(exported[key], whole) for key, whole in worker.truth().items())


@pytest.mark.usefixtures("seen")
def test_such_a_directory_is_inspected_and_verified(out: Path, tmp_path: Path) -> None:
    assert offline.inspect(out / "ours").tensors["model.experts.w1"].shape == (4, 6, 3)
    assert offline.shapes(out / "ours")["model.vocabulary"] == (7, 2)
    for contents in (False, True):
        assert offline.verify(out / "ours", contents=contents).sound
    copytree(out / "ours", tmp_path / "damaged")
    # A file of replicas alone, which no load of one rank reads.
    file = tmp_path / "damaged" / "model_3.pt"
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor([5000.0, 5001.0, 5002.0]).numpy().tobytes()) + 2] ^= 8
    file.write_bytes(data)
    (fault,) = offline.verify(tmp_path / "damaged", contents=True).faults
    assert (fault.kind, fault.files) == ("checksum", ("model_3.pt",))


@meshes_say_their_rank
@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.usefixtures("seen")
def test_the_file_of_another_rank_is_refused_by_what_its_dtensors_say(
    out: Path, tmp_path: Path, kind: str
) -> None:
    copytree(out / kind, tmp_path / "swapped")
    copy(tmp_path / "swapped" / "model_1.pt", tmp_path / "swapped" / "model_0.pt")
    with pytest.raises(PlacementError, match="was written by rank 1, in the file of rank 0"):
        offline.verify(tmp_path / "swapped")
