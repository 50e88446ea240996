"""What differs between two checkpoints, against torch's own comparison of the whole tensors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from dcp_placements import Renames, Replace, Unstack
from dcp_placements.offline import CannotLook, diff, to_json, verify
from dcp_placements.offline.difference import FirstElement, Tally
from dcp_placements.testing import damage
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes
from tests.storage_scenes import Flipped, all_kinds

W1 = "layers.0.experts.w1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in four layouts and two formats."""
    path = tmp_path_factory.mktemp("saved")
    save_sharded(path / "ep2")
    save_sharded(path / "ep4", ep=4, lean=False, digests="off")
    dcp.save({**wholes(), "step": 1}, checkpoint_id=path / "plain")
    save_hugging_face(path / "hf", wholes())
    return path


LAYOUTS = ["ep2", "ep4", "plain", "hf"]


@pytest.mark.parametrize(("a", "b"), [*combinations_with_replacement(LAYOUTS, 2)])
@pytest.mark.parametrize("memory", ["2GiB", "160"])
def test_equal_contents_are_the_same_in_any_layout_and_format(
    saved: Path, run: Run, a: str, b: str, memory: str
) -> None:
    ran = run("diff", saved / a, saved / b, "--json", "--memory", memory)
    assert ran.code == 0, ran.out
    result = ran.json
    assert (result["same"], result["differences"]) == (True, [])
    assert result["compared"] == {
        "tensors": len(wholes()),
        "bytes": sum(tensor.nbytes for tensor in wholes().values()),
    }


@pytest.mark.parametrize("memory", [2 << 30, 200])
@pytest.mark.parametrize("other", ["ep2", "ep4", "hf"])
def test_a_changed_element_is_named_with_its_index(
    saved: Path, tmp_path: Path, other: str, memory: int
) -> None:
    changed = wholes()
    changed[W1][5, 2, 1] += 3
    changed[W1][6, 0, 0] -= 7
    dcp.save({**changed, "step": 1}, checkpoint_id=tmp_path)
    found = diff(saved / other, tmp_path, memory=memory)
    (difference,) = found.differences
    assert (difference.kind, difference.fqn) == ("values", W1)
    assert difference.differing == 2
    assert difference.max_abs == 7
    was = wholes()[W1][5, 2, 1].item()
    assert difference.first == FirstElement((5, 2, 1), was, was + 3)


def test_keys_shapes_and_dtypes(saved: Path, tmp_path: Path) -> None:
    changed = wholes()
    del changed["scale"]
    changed["layers.0.norm"] = changed["layers.0.norm"].float()
    changed["layers.1.attention"] = changed["layers.1.attention"].reshape(10, 6)
    changed[W1] = changed[W1].double()
    changed[W1][0, 0, 1] += 0.5
    dcp.save({**changed, "step": 1, "new": torch.ones(2)}, checkpoint_id=tmp_path)
    expected = {d.fqn: d for d in diff(saved / "ep2", tmp_path).differences}
    assert {fqn: d.kind for fqn, d in expected.items()} == {
        "scale": "missing",
        "new": "extra",
        "layers.0.norm": "dtype",
        "layers.1.attention": "shape",
        W1: "dtype",
    }
    assert expected["layers.0.norm"].message.endswith("the values are the same")
    assert (expected[W1].differing, expected[W1].max_abs, expected[W1].first) == (
        1,
        0.5,
        FirstElement((0, 0, 1), 1.0, 1.5),
    )
    assert "(6, 10)" in expected["layers.1.attention"].message


def test_a_prefix_that_makes_two_sides_equal_is_suggested(tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.arange(6.0), "layers.1.w": torch.ones(2), "norm": torch.ones(3)}
    dcp.save({"model": weights, "step": 1}, checkpoint_id=tmp_path / "a")
    dcp.save(weights, checkpoint_id=tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    (note,) = found.notes
    assert note.startswith("3 tensors of the first begin with 'model.'")
    (shown,) = re.findall(r"rename=(lambda .*) compares them", note)
    renamed = diff(tmp_path / "a", tmp_path / "b", rename=eval(shown))
    assert [one.fqn for one in renamed.differences] == ["step"]

    (note,) = diff(tmp_path / "b", tmp_path / "a").notes
    assert note.startswith("3 tensors of the second begin with 'model.'")
    (shown,) = re.findall(r"rename=(lambda .*) compares them", note)
    renamed = diff(tmp_path / "b", tmp_path / "a", rename=eval(shown))
    assert [one.fqn for one in renamed.differences] == ["step"]

    dcp.save({"other": torch.ones(2), "norm": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    assert diff(tmp_path / "b", tmp_path / "c").notes == ()


def test_nans_and_infinities(tmp_path: Path) -> None:
    one = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan, 0.0])
    other = torch.tensor([1.0, math.nan, math.inf, math.inf, 2.0, -0.0])
    for name, tensor in (("a", one), ("b", other)):
        dcp.save({"w": tensor}, checkpoint_id=tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "a").same
    (found,) = diff(tmp_path / "a", tmp_path / "b").differences
    assert (found.differing, found.nans, found.max_abs) == (3, 1, math.inf)
    assert found.first == FirstElement((3,), "-inf", "inf")
    assert json.loads(json.dumps(to_json(found)))["max_abs"] == "inf"
    (found,) = diff(tmp_path / "a", tmp_path / "b", atol=1.0).differences
    assert found.differing == 2


@examples(30)
@given(st.data())
def test_tolerances_are_those_of_torch(data: st.DataObject) -> None:
    numbers = st.lists(
        st.floats(width=32) | st.sampled_from([0.0, 1.0, math.nan, math.inf]),
        min_size=6,
        max_size=6,
    )
    one, other = (torch.tensor(data.draw(numbers)).reshape(2, 3) for _ in range(2))
    rtol, atol = (data.draw(st.sampled_from([0.0, 1e-3, 0.5])) for _ in range(2))
    tally = Tally()
    tally.add(one, other, (10, 20), rtol=rtol, atol=atol)
    if rtol or atol:
        differs = ~torch.isclose(one.double(), other.double(), rtol=rtol, atol=atol, equal_nan=True)
    else:
        differs = one.view(torch.int32) != other.view(torch.int32)
    assert tally.differing == int(differs.sum())
    if tally.differing:
        row, column = differs.nonzero()[0].tolist()
        assert tally.first is not None
        assert tally.first.index == (row + 10, column + 20)
        gaps = (one.double() - other.double()).abs()[differs]
        known = gaps[~gaps.isnan()]
        assert tally.max_abs == (float(known.max()) if len(known) else None)
        assert tally.nans == int(gaps.isnan().sum())


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        (2**63 - 1, -(2**63), torch.int64),
        (2**60, 2**60 + 1, torch.int64),
        (2**64 - 1, 2**64 - 2, torch.uint64),
        (2**64 - 1, 0, torch.uint64),
    ],
)
def test_large_integers_are_near_where_they_are(one: int, other: int, dtype: torch.dtype) -> None:
    """Neither an int64 that overflows nor a float64 that rounds makes them near."""
    for a, b in ((one, other), (other, one)):
        tally = Tally()
        pair = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
        tally.add(*pair, (0,), rtol=0.0, atol=0.5)
        assert tally.differing == 1
        assert tally.max_abs == float(abs(a - b))


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    kinds = all_kinds()
    dcp.save(kinds, checkpoint_id=tmp_path / "a")
    changed = {}
    for fqn, value in kinds.items():
        if isinstance(value, torch.Tensor) and value.numel():
            flat = value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).clone()
            flat[0] ^= 1
            changed[fqn] = flat.view(value.dtype).view(value.shape)
        else:
            changed[fqn] = value
    dcp.save(changed, checkpoint_id=tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "a").same
    found = {d.fqn: d for d in diff(tmp_path / "a", tmp_path / "b").differences}
    expected = {k for k, v in kinds.items() if isinstance(v, torch.Tensor) and v.numel()}
    assert set(found) == expected
    for fqn, difference in found.items():
        assert (difference.kind, difference.differing) == ("values", 1), fqn
        assert difference.first is not None
        assert difference.first.index == (0,) * kinds[fqn].ndim


@pytest.mark.parametrize("memory", [2 << 30, 160])
def test_an_export_of_stacked_experts_is_proved_by_its_rename(
    saved: Path, tmp_path: Path, memory: int
) -> None:
    """The rows are cut by slicing here: one element of one expert differs in the second export."""
    rename = Renames(Unstack("experts.{}.w*"), Replace("layers", "model.layers"))
    expected = {"scale": wholes()["scale"]}
    for key, tensor in wholes().items():
        rest = key.removeprefix("layers.0.experts.") if "experts" in key else ""
        if rest:
            rows = {f"model.layers.0.experts.{i}.{rest}": row for i, row in enumerate(tensor)}
            expected.update(rows)
        elif key != "scale":
            expected[f"model.{key}"] = tensor
    save_hugging_face(tmp_path / "hf", expected)
    same = diff(saved / "ep2", tmp_path / "hf", rename=rename, memory=memory)
    assert (same.differences, same.compared["tensors"]) == ((), len(expected))

    flipped = "model.layers.0.experts.5.w1"
    expected[flipped] = expected[flipped].clone()
    expected[flipped][4, 1] += 2
    save_hugging_face(tmp_path / "other", expected)
    (found,) = diff(saved / "ep2", tmp_path / "other", rename=rename, memory=memory).differences
    assert (found.kind, found.fqn, found.differing, found.max_abs) == ("values", flipped, 1, 2)
    assert found.first is not None
    assert found.first.index == (4, 1)


def test_an_export_of_a_training_checkpoint_is_proved(tmp_path: Path, run: Run) -> None:
    """Its weights stand below ``model``, beside optimizer state that the export leaves out."""
    w, norm = torch.arange(12.0).reshape(4, 3), torch.ones(5)
    moments = {key: {"exp_avg": torch.zeros_like(t)} for key, t in (("w", w), ("norm", norm))}
    state = {"model": {"w": w, "norm": norm}, "optim": {"state": moments}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    save_hugging_face(tmp_path / "hf", {"net.w": w, "net.norm": norm})
    found = diff(tmp_path / "step", tmp_path / "hf", rename=lambda key: f"net.{key}")
    assert (found.differences, found.compared["tensors"]) == ((), 2)
    assert "optim.state.norm.exp_avg" in found.notes[0]
    # With the optimizer's state, and under the whole keys.
    every = {"model.w": w, "model.norm": norm, "optim.state.w.exp_avg": torch.zeros(4, 3)}
    save_hugging_face(tmp_path / "every", every)
    (missing,) = diff(tmp_path / "step", tmp_path / "every", prefix="").differences
    assert (missing.kind, missing.fqn) == ("missing", "optim.state.norm.exp_avg")
    assert run("diff", tmp_path / "step", tmp_path / "every", "--prefix", "").code == 1
    save_hugging_face(tmp_path / "less", {"w": w})
    (missing,) = diff(tmp_path / "step", tmp_path / "less").differences
    assert (missing.kind, missing.fqn) == ("missing", "norm")


def test_a_rename_maps_the_firsts_keys(saved: Path, tmp_path: Path, run: Run) -> None:
    dcp.save({f"model.{k}": v for k, v in wholes().items()}, checkpoint_id=tmp_path / "prefixed")
    assert not diff(saved / "hf", tmp_path / "prefixed").same
    assert diff(saved / "hf", tmp_path / "prefixed", rename=lambda key: f"model.{key}").same
    with pytest.raises(CannotLook, match="x: rename= gives this one name to both"):
        diff(saved / "hf", tmp_path / "prefixed", rename=lambda key: "x")
    module = tmp_path / "some_renames.py"
    module.write_text("def prefixed(key):\n    return 'model.' + key\n")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        ran = run("diff", saved / "hf", "prefixed", "--rename", "some_renames:prefixed")
        missing = run("diff", saved / "hf", "prefixed", "--rename", "some_renames:nothing")
        absent = run("diff", saved / "hf", "prefixed", "--rename", "no_such_module:f")
    finally:
        os.chdir(before)
    assert ran.code == 0, ran.out + ran.err
    assert (missing.code, absent.code) == (2, 2)
    assert "has no function nothing" in missing.err
    assert "no_such_module cannot be imported" in absent.err


def test_a_pattern_picks_what_is_compared(saved: Path, tmp_path: Path, run: Run) -> None:
    dcp.save({**wholes(), W1: torch.zeros(1)}, checkpoint_id=tmp_path)
    assert run("diff", saved / "hf", tmp_path, "--fqn", "experts.w2").code == 0
    assert run("diff", saved / "hf", tmp_path, "--fqn", "experts").code == 1
    for asked in (("diff", tmp_path, tmp_path), ("inspect", tmp_path)):
        nothing = run(*asked, "--fqn", "expert.w2")
        assert nothing.code == 2
        assert "no key matches 'expert.w2'" in nothing.err


def test_damaged_checkpoints_are_different_and_say_why(saved: Path, tmp_path: Path) -> None:
    for harm, kind in (
        (damage.drop_chunk, "incomplete"),
        (damage.overlap_chunk, "incomplete"),
        (damage.truncate, "unreadable"),
        (damage.remove_file, "unreadable"),
        (damage.flip_bit, "values"),
    ):
        path = tmp_path / harm.__name__
        save_sharded(path)
        harm(path, W1, chunk=1)
        for pair in ((path, saved / "ep4"), (saved / "ep4", path)):
            found = diff(*pair, fqn=W1)
            assert [d.kind for d in found.differences] == [kind], harm


def test_what_an_index_names_and_no_file_has_is_no_sameness(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    lost = max(tmp_path.glob("*.safetensors"))
    lost.unlink()
    (found,) = diff(tmp_path, tmp_path).differences
    assert (found.kind, found.fqn) == ("unreadable", "b")
    assert lost.name in found.message
    assert run("diff", tmp_path, tmp_path).code == 1


@pytest.mark.parametrize("key", ["w", "lr"])
def test_a_file_that_may_not_be_read_is_no_difference(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    dcp.save({"w": torch.ones(3), "lr": 0.1}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save({"w": torch.ones(3), "lr": 0.1}, checkpoint_id=tmp_path / "b", no_dist=True)
    file = tmp_path / "b" / "__0_0.distcp"
    opened = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    err = run.fails("diff", tmp_path / "a", tmp_path / "b", "--fqn", key)
    assert f"{file}: it cannot be read: [Errno 13] Permission denied" in err


def test_objects_are_compared_and_never_executed(tmp_path: Path) -> None:
    one: dict[str, Any] = {"lr": 0.1, "state": {"a": [1, 2], "t": torch.ones(2)}, "path": Path("x")}
    dcp.save(one, checkpoint_id=tmp_path / "a")
    dcp.save({**one, "lr": 0.2, "path": Path("y")}, checkpoint_id=tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "a").same
    expected = {d.fqn: d.message for d in diff(tmp_path / "a", tmp_path / "b").differences}
    assert expected["lr"] == "0.1 and 0.2"
    assert "unsafe" in expected["path"]
    assert set(expected) == {"lr", "path"}


def test_transforms_that_nobody_here_can_undo_are_unreadable(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "a", _extensions=[Flipped()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b")
    (found,) = diff(tmp_path / "a", tmp_path / "b").differences
    assert found.kind == "unreadable"
    (fault,) = verify(tmp_path / "a", contents=True).faults
    assert fault.kind == "wrong_record"


@pytest.mark.usefixtures("flipped_is_known")
def test_m88_objects_are_compared_as_they_were_before_transforms(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "step": 7, "path": Path("x")}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a", _extensions=[Flipped()]))
    dcp.save(state, checkpoint_id=tmp_path / "b")
    dcp.save({**state, "step": 8}, checkpoint_id=tmp_path / "c")
    assert diff(tmp_path / "a", tmp_path / "b").same
    (found,) = diff(tmp_path / "a", tmp_path / "c").differences
    assert (found.fqn, found.message) == ("step", "7 and 8")


def test_numbered_families_are_one_line(tmp_path: Path, run: Run) -> None:
    def save(name: str, *, experts: int, changed: int) -> Path:
        state_dict = {
            f"layers.{layer}.experts.{expert}.{weight}": torch.ones(2)
            for layer in range(12)
            for expert in range(experts)
            for weight in ("w1", "w2")
        }
        for layer in range(12):
            state_dict[f"layers.{layer}.norm"] = torch.full((2,), float(layer < changed))
        dcp.save(state_dict, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    full = save("full", experts=3, changed=0)
    lines = run("diff", full, save("none", experts=0, changed=4)).out.splitlines()
    assert lines[0].startswith("76 differences: 72 missing, 4 values (12 tensors")
    assert lines[1] == "layers.0-11.experts.0-2.w1: missing (36)"
    assert "layers.0-3.norm: values (4)" in lines
    families = diff(full, save("fewer", experts=2, changed=0)).families
    assert [(f.name, f.kind, f.keys) for f in families] == [
        (f"layers.0-11.experts.2.{weight}", "missing", 12) for weight in ("w1", "w2")
    ]


def packed(*values: int, dtype: torch.dtype = torch.float4_e2m1fn_x2) -> torch.Tensor:
    return torch.tensor([values] * 2, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (packed(1, 42, 0), packed(1, 42, 0), None),
        (packed(1, 42, 0), packed(1, 43, 255), "4 of 6 elements differ; the first at (0, 1): 0x2a"),
        (packed(1, 42, 0), packed(1, 42, 0, dtype=torch.uint8), "the values are the same"),
        (
            packed(1, 42, 0),
            packed(1, 40, 0, dtype=torch.uint8),
            "2 of 6 elements differ; the first",
        ),
        (packed(1, 42, 0), torch.ones(2, 3), "not compared, torch makes no numbers of"),
    ],
    ids=["same", "other bits", "as bytes", "other bytes", "numbers"],
)
@pytest.mark.parametrize("atol", [0.0, 1.0])
def test_m155_packed_elements_are_compared_bit_by_bit(
    one: torch.Tensor,
    other: torch.Tensor,
    expected: str | None,
    atol: float,
    tmp_path: Path,
    run: Run,
) -> None:
    for name, value in (("a", one), ("b", other)):
        dcp.save({"w": value, "v": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    found = diff(tmp_path / "a", tmp_path / "b", atol=atol)
    assert found.same == (expected is None)
    if expected is not None:
        (difference,) = found.differences
        assert (difference.fqn, difference.max_abs, difference.nans) == ("w", None, 0)
        assert expected in difference.message
    ran = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert ran.code == (0 if expected is None else 1)
    assert json.loads(ran.out)["same"] == (expected is None)
