"""Megatron's files become whole tensors; the truth is what they were cut from."""

from __future__ import annotations

import argparse
import io
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import assert_holds, read_whole
from torch.utils._pytree import tree_map_only

from dcp_placements import (
    PlacementError,
)
from dcp_placements.offline import CannotLook, import_checkpoint, open_source, verify
from dcp_placements.offline.element_bits import same_bits
from dcp_placements.offline.sources.mapped_files import load_torch_file
from dcp_placements.storage.store import open_store
from dcp_placements.testing.megatron import (
    MegatronModel,
    MegatronRun,
    padded,
    write_legacy,
)
from tests.offline_scenes import Run, overwriting

WEIGHTS = "model_optim_rng.pt"
MOE = MegatronModel()

RUNS = {
    "one rank": MegatronRun(),
    "tp2 pp2": MegatronRun(tp=2, pp=2),
    "tp2 ep2 etp2": MegatronRun(tp=2, ep=2, etp=2),
    "tp2 ep2 etp1": MegatronRun(tp=2, ep=2, etp=1),
    "tp2 ep4 etp1": MegatronRun(tp=2, ep=4, etp=1),
    "tp4 ep2 etp1": MegatronRun(tp=4, ep=2, etp=1),
    "tp2 etp1": MegatronRun(tp=2, etp=1),
    "cp2 tp2": MegatronRun(tp=2, cp=2),
    "pp2 vpp2": MegatronRun(tp=2, pp=2, vpp=2),
    "tp2 pp2 ep2 etp1": MegatronRun(tp=2, pp=2, ep=2, etp=1),
}
MODELS = {
    "moe": MOE,
    "sequential experts, tied, padded, biases": padded(
        replace(MOE, vocab=21, tied=True, grouped=False, bias=True), 8
    ),
}


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file holds."""
    held = torch.load(file, weights_only=False)
    change(held)
    torch.save(held, file)


def plain(tmp_path: Path, run: MegatronRun, model: MegatronModel = MOE, **options: Any) -> Path:
    """Write files whose arguments hold no enumeration, so that the test can load them, too."""
    folder = write_legacy(tmp_path / "megatron", model, run, **options)
    for file in folder.glob("*/model_optim_rng.pt"):
        read = load_torch_file(open_store(folder), str(file.relative_to(folder)))
        held = tree_map_only(torch.Tensor, torch.clone, read)
        if "args" in held:
            plain = {"attention_backend": "auto", "params_dtype": torch.bfloat16}
            held["args"] = argparse.Namespace(**held["args"].fields | plain)
        for key, chunk in held.items():
            if key.startswith("model"):
                held[key] = {k: io.BytesIO() if "_extra" in k else v for k, v in chunk.items()}
        torch.save(held, f"{file}.new")
        os.replace(f"{file}.new", file)
    return folder


WITH_BIASES = (
    "one rank",
    "tp2 ep2 etp2",
    "tp2 ep4 etp1",
    "cp2 tp2",
    "pp2 vpp2",
    "tp2 pp2 ep2 etp1",
)


@pytest.mark.parametrize(
    ("run", "name"),
    [(run, name) for name in MODELS for run in RUNS if name == "moe" or run in WITH_BIASES],
)
def test_every_layout_becomes_the_whole_model(run: str, name: str, tmp_path: Path) -> None:
    megatron, model = RUNS[run], MODELS[name]
    write_legacy(tmp_path / "megatron", model, megatron)
    report = import_checkpoint(tmp_path / "megatron", tmp_path / "out")
    assert_holds(tmp_path / "out", model.truth())
    assert set(report.keys) == set(model.truth())
    assert verify(tmp_path / "out").sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "out"]


@pytest.mark.parametrize("name", ["tp2 ep4 etp1", "pp2 vpp2"])
def test_every_byte_is_written_or_accounted_for(name: str, tmp_path: Path) -> None:
    model = MODELS["sequential experts, tied, padded, biases"]
    folder = plain(tmp_path, RUNS[name], model, optimizer="float16")
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        for inner in value.values() if isinstance(value, dict) else ():
            walk(inner)
        for inner in value if isinstance(value, list) else ():
            walk(inner)

    for file in folder.glob("*/*.pt"):
        walk(torch.load(file, weights_only=False))
    report = import_checkpoint(folder, tmp_path / "out")
    assert report.accounted["source"] == sum(tensor.nbytes for tensor in found)
    assert report.nbytes == sum(whole.nbytes for whole in model.truth().values())
    pad = (model.padded_vocab or 0) - model.vocab
    assert report.accounted["padding, dropped"] == 2 * pad * model.hidden * 2  # in two files
    expected = {part.what: part.nbytes for part in report.beside}
    assert expected["rng_state"] == 8 * 4 * len(list(folder.iterdir()))


def test_an_incomplete_set_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_legacy(tmp_path / "m", MOE, MegatronRun(tp=4, ep=2, etp=1, early_writers=True))
    (tmp_path / "empty").mkdir()
    for out in ("out", "empty"):
        with pytest.raises(PlacementError, match="no mp_rank_02_000, mp_rank_03_001"):
            import_checkpoint(tmp_path / "m", tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "m"]


NORM = "decoder.final_layernorm.weight"
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
EXPERT = "decoder.layers.1.mlp.experts.linear_fc1.weight1"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("run", "files", "key", "named"),
    [
        (RUNS["tp2 pp2"], ("mp_rank_01_001", "mp_rank_00_001"), NORM, NORM),
        (RUNS["tp4 ep2 etp1"], ("mp_rank_02_000", "mp_rank_00_000"), EXPERT, EXPERT),
        (RUNS["tp2 ep4 etp1"], ("mp_rank_00_002", "mp_rank_00_000"), QKV, QKV),
        (MegatronRun(tp=1, pp=2), ("mp_rank_00_001", "mp_rank_00_000"), OUTPUT, EMBEDDING),
    ],
    ids=["replicated", "expert twice", "dense twice", "tied"],
)
def test_copies_that_differ_are_refused(
    run: MegatronRun, files: tuple[str, str], key: str, named: str, tmp_path: Path
) -> None:
    folder = plain(tmp_path, run, replace(MOE, tied=key == OUTPUT))
    edit(folder / files[0] / WEIGHTS, lambda held: held["model"][key].view(-1)[-1:].add_(1))
    with pytest.raises(PlacementError, match=r"differ in 1 of \d+ elements") as caught:
        import_checkpoint(folder, tmp_path / "out")
    held = " and ".join(f"{file}/{WEIGHTS}" for file in files)
    assert f"{named}: {held} hold it" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_equal_nans_are_equal(tmp_path: Path) -> None:
    folder = plain(tmp_path, RUNS["tp2 ep4 etp1"])
    key = "decoder.final_layernorm.weight"
    for file in folder.glob("*/*.pt"):
        edit(file, lambda held: held["model"][key].fill_(float("nan")))
    import_checkpoint(folder, tmp_path / "out")
    assert read_whole(tmp_path / "out", key)[key].isnan().all()


def test_what_no_rule_names_is_refused_under_tensor_parallelism(tmp_path: Path) -> None:
    folder = plain(tmp_path, MegatronRun(tp=2))
    for file in folder.glob("*/*.pt"):
        edit(file, lambda held: held["model"].update({"decoder.new.weight": torch.ones(3, 2)}))
    with pytest.raises(PlacementError, match=r"decoder\.new\.weight: no rule of the preset"):
        import_checkpoint(folder, tmp_path / "out")


def test_weights_that_are_no_plain_tensors_are_refused(tmp_path: Path) -> None:
    folder = plain(tmp_path, MegatronRun())
    file = folder / "mp_rank_00" / WEIGHTS
    edit(file, lambda held: held["model"].update({"output_layer.weight": [torch.ones(2)]}))
    with pytest.raises(PlacementError, match=r"output_layer\.weight: mp_rank_00 has a list there"):
        import_checkpoint(folder, tmp_path / "out")


def test_arguments_that_the_weights_contradict_are_refused(tmp_path: Path) -> None:
    folder = plain(tmp_path, MegatronRun(tp=2, pp=2))

    def change(held: dict[str, Any]) -> None:
        held["args"].num_layers = 6
        held["args"].num_experts = 16
        held["args"].padded_vocab_size = 32

    for file in folder.glob("*/*.pt"):
        edit(file, change)
    with pytest.raises(PlacementError) as caught:
        import_checkpoint(folder, tmp_path / "out")
    for message in (
        "decoder.layers: 4 in all stages together, where args say 6",
        "experts: 4 in a file, 4 over EP 1, where args say 16",
        "embedding: 24 rows over all ranks, where args say 32",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize("version", [None, 0, 1.0])
def test_files_of_a_version_with_another_order_of_qkv_are_refused(
    version: float | None, tmp_path: Path
) -> None:
    folder = plain(tmp_path, MegatronRun())

    def change(held: dict[str, Any]) -> None:
        del held["checkpoint_version"]
        if version is not None:
            held["checkpoint_version"] = version

    edit(folder / "mp_rank_00" / WEIGHTS, change)
    with pytest.raises(PlacementError, match=f"checkpoint version {version or 0}, which orders"):
        import_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_true_vocabulary_is_given_or_kept_with_its_padding(tmp_path: Path) -> None:
    folder = plain(tmp_path, MegatronRun(tp=2), padded(replace(MOE, vocab=21), 8))
    for file in folder.glob("*/*.pt"):
        edit(file, lambda held: setattr(held["args"], "vocab_size", None))
    report = import_checkpoint(folder, tmp_path / "kept")
    assert "all 24 rows of the vocabulary are kept" in report.notes[1]
    key = "output_layer.weight"
    whole = replace(MOE, vocab=24).truth()[key]
    assert same_bits(read_whole(tmp_path / "kept", key)[key], whole)
    import_checkpoint(open_source(folder, vocab_size=20), tmp_path / "given")
    assert same_bits(read_whole(tmp_path / "given", key)[key], whole[:20])
    with pytest.raises(PlacementError, match="vocab_size 25, but it has 24 rows"):
        import_checkpoint(open_source(folder, vocab_size=25), tmp_path / "more")
    for file in folder.glob("*/*.pt"):
        edit(file, lambda held: vars(held["args"]).update(NULL_TOKENIZER))
    import_checkpoint(folder, tmp_path / "null")
    assert same_bits(read_whole(tmp_path / "null", key)[key], whole[:21])


NULL_TOKENIZER = {"vocab_size": 20, "tokenizer_type": "NullTokenizer"}
"""It puts an end-of-document token behind all words, which the argument does not count."""


@pytest.mark.parametrize("optimizer", ["float16", "distributed"])
def test_an_optimizer_is_left_out_with_the_reason(tmp_path: Path, optimizer: str) -> None:
    write_legacy(tmp_path / "m", MOE, MegatronRun(tp=2), optimizer=optimizer)
    report = import_checkpoint(tmp_path / "m", tmp_path / "out")
    reasons = {part.what: part.why for part in report.beside}
    assert "save it as torch_dist" in reasons["optimizer"]
    assert ("distrib_optim.pt" in reasons) is (optimizer == "distributed")
    assert_holds(tmp_path / "out", MOE.truth())


def test_without_arguments_the_experts_cut_is_to_be_given(tmp_path: Path) -> None:
    write_legacy(tmp_path / "m", MOE, MegatronRun(tp=2, etp=1), args=False)
    with pytest.raises(PlacementError, match="may be cut or replicated over TP"):
        import_checkpoint(tmp_path / "m", tmp_path / "out")
    (tmp_path / "out").mkdir()
    import_checkpoint(open_source(tmp_path / "m", expert_tensor_parallel_size=1), tmp_path / "out")
    assert_holds(tmp_path / "out", MOE.truth())


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x02a.", b"\x80\x02K\x01Q.", b"\x80\x02h\x05.", b"\x80\x02(lp", b"\x80\x02Ncx"],
)
def test_a_pickle_that_raises_anything_is_one_message(
    tmp_path: Path, run: Run, pickled: bytes
) -> None:
    folder = write_legacy(tmp_path / "m", MOE, MegatronRun(tp=2))
    file = folder / "mp_rank_01" / WEIGHTS
    with zipfile.ZipFile(file) as before:
        records = {info.filename: before.read(info) for info in before.infolist()}
    with zipfile.ZipFile(file, "w") as after:
        for name, record in records.items():
            after.writestr(name, pickled if name.endswith("data.pkl") else record)
    with pytest.raises(PlacementError, match="mp_rank_01"):
        import_checkpoint(folder, tmp_path / "out")
    ran = run("import", folder, tmp_path / "out")
    assert ran.code in (1, 2)
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out").exists()


def test_the_command_reports(tmp_path: Path, run: Run) -> None:
    write_legacy(tmp_path / "m", MOE, MegatronRun(tp=2, ep=2, etp=1))
    arguments = ("import", tmp_path / "m", tmp_path / "out")
    ran = run(*arguments, "--json")
    result = json.loads(ran.out)
    assert ran.code == 0
    assert result["tensors"] == len(MOE.truth())
    accounted = result["accounted"]
    beside = sum(part["bytes"] for part in result["beside"])
    assert accounted["source"] == result["bytes"] + accounted["copies, found equal"] + beside


def test_files_that_are_overwritten_meanwhile_are_refused(tmp_path: Path) -> None:
    source = write_legacy(tmp_path / "m", MOE, MegatronRun(tp=2))
    with pytest.raises(CannotLook, match="it was overwritten while it was read") as caught:
        import_checkpoint(source, tmp_path / "out", progress=overwriting(source, "*.pt"))
    assert "mp_rank_01/model_optim_rng.pt" in str(caught.value)
    assert not (tmp_path / "out").exists()
