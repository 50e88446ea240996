"""``inspect`` and ``verify`` of metadata run where torch cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_placements.storage.metadata.properties import DTYPES, LAYOUTS, dtype_of
from dcp_placements.testing import damage
from tests.offline_scenes import save_hugging_face, save_sharded
from tests.storage_scenes import all_kinds

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from dcp_placements.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_torch(*arguments: Any) -> tuple[int, Any]:
    """Return the exit code of a command, and the document that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def save(path: Path, kind: str) -> dict[str, Any]:
    """Save tensors in one of the forms that a checkpoint has; return them."""
    if kind == "safetensors":
        tensors = {"a": torch.ones(2, 3), "b": torch.ones(5).to(torch.bfloat16)}
        save_hugging_face(path, tensors)
        return tensors
    if kind == "every dtype, by torch":
        held = all_kinds()
        dcp.save(held, checkpoint_id=path, no_dist=True)
        return held
    return save_sharded(path, lean=kind != "stock", stock_metadata=kind != "index alone")


@pytest.mark.parametrize(
    "kind", ["index", "index alone", "stock", "every dtype, by torch", "safetensors"]
)
def test_inspect_and_verify_need_no_torch(tmp_path: Path, kind: str) -> None:
    saved = save(tmp_path / "step", kind)
    code, shown = run_without_torch("inspect", tmp_path / "step")
    assert code == 0
    tensors = {fqn: value for fqn, value in saved.items() if isinstance(value, torch.Tensor)}
    found = {
        fqn: (tensor["shape"], tensor["dtype"], tensor["bytes"])
        for fqn, tensor in shown["tensors"].items()
    }
    assert found == {
        fqn: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for fqn, tensor in tensors.items()
    }
    # Records of other strides are read by torch.load: verify is not free of torch there.
    if kind == "every dtype, by torch":
        return
    code, verdict = run_without_torch("verify", tmp_path / "step")
    assert (code, verdict["faults"], verdict["checked"]["tensors"]) == (0, [], len(tensors))
    if kind in ("index", "stock"):
        damage.remove_file(tmp_path / "step", "layers.0.norm")
        code, verdict = run_without_torch("verify", tmp_path / "step")
        assert code == 1
        assert {fault["kind"] for fault in verdict["faults"]} == {"missing_file"}


def test_every_dtype_and_layout_of_torch_is_known() -> None:
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            assert (DTYPES[name].itemsize, DTYPES[name].torch) == (value.itemsize, value)
            assert dtype_of(value) is DTYPES[name]
        if isinstance(value, torch.layout):
            assert str(value) in LAYOUTS
