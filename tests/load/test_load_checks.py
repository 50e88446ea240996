"""A load that is declared otherwise than its checkpoint was saved is refused; what may differ is
quiet.

The ranks are simulated. The whole tensors are cut by plain slicing here, as a framework would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    arange,
    assert_same,
    blank,
    edit_metadata,
    load,
    refused,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    LoadReport,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import FakeDTensor, World

ONE, WORLD, FOUR = World(1), World(2), World(4)
GATE_UP = "layers.0.mlp.gate_up_proj.weight"


def fused_part(whole: torch.Tensor, parts: int, ranks: int, rank: int) -> torch.Tensor:
    """Return what a rank holds of several tensors in one, each cut by rows."""
    return torch.cat([part.chunk(ranks)[rank] for part in whole.chunk(parts)])


def tp_rules(world: World, pattern: str, placement: Any) -> Callable[[int], PlacementRules]:
    def on(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, tp=world.size)
        return PlacementRules({pattern: CheckpointPlacement(mesh, {"tp": placement})})

    return on


def tp_dtensor(world: World, local: torch.Tensor, rank: int, rows: int) -> FakeDTensor:
    """Return a DTensor that says that ``tp`` cuts it plainly."""
    return FakeDTensor(local, world.mesh(rank, tp=world.size), [Shard(0)], (rows, *local.shape[1:]))


def save_fused(path: Path, whole: torch.Tensor, key: str = GATE_UP, **options: Any) -> None:
    """Save a fused gate|up from two ranks of ``tp``, with the rule that it needs."""

    def state(rank: int) -> dict[str, Any]:
        return {key: tp_dtensor(WORLD, fused_part(whole, 2, 2, rank), rank, len(whole))}

    save(WORLD, path, state, tp_rules(WORLD, key, FusedShard(0, 2)), **options)


def plain_template(rank: int) -> dict[str, Any]:
    return {GATE_UP: tp_dtensor(WORLD, torch.zeros(4, 3), rank, 8)}


def plain_w(rank: int) -> dict[str, Any]:
    """Return the template of a key whose name says nothing."""
    return {"w": plain_template(rank)[GATE_UP]}


# M46: the rule of a fused tensor forgotten, or another one.


def test_a_wrong_dim_at_the_save_is_named_by_the_load(tmp_path: Path) -> None:
    """Both shapes are possible, so that the save could not see it."""
    save(WORLD, tmp_path, lambda rank: {"w": torch.ones(4, 6)}, tp_rules(WORLD, "w", Shard(1)))
    with refused() as refusal:
        rules = tp_rules(WORLD, "w", Shard(0))
        load(WORLD, tmp_path, lambda rank: {"w": torch.zeros(4, 6)}, rules)
    refusal.says(
        "w: the checkpoint holds a (4, 12) tensor, but (8, 6) is needed",
        "saved:       Shard(1) over 'tp' of size 2",
        "this load:   Shard(0) over 'tp' of size 2",
    )


def test_padding_is_the_likely_cause_of_a_few_rows_more(tmp_path: Path) -> None:
    def rules(rank: int, **shapes: Any) -> PlacementRules:
        mesh = WORLD.mesh(rank, tp=2)
        return PlacementRules({"w": CheckpointPlacement(mesh, {"tp": Shard(0)}, **shapes)})

    shapes = {"global_shape": (50, 3), "padded_shape": (56, 3)}
    state = {"w": torch.ones(28, 3)}
    save(WORLD, tmp_path, lambda rank: state, lambda rank: rules(rank, **shapes))
    with refused() as refusal:
        load(WORLD, tmp_path, lambda rank: state, rules)
    refusal.says(
        "likely:      uneven parts, or padding: rows that are not stored",
        "way out:     global_shape=(50, 3) in the rule, and padded_shape=(56, 3) for padding",
    )
    assert "another size" not in refusal.text
    load(WORLD, tmp_path, lambda rank: state, lambda rank: rules(rank, **shapes))


def test_a_waiver_with_its_reason_lets_another_cut_pass(tmp_path: Path) -> None:
    whole = arange(8, 3)
    save_fused(tmp_path, whole)
    reason = "cut apart by hand afterwards"
    with without_warning():
        loaded, reports = load(WORLD, tmp_path, plain_template, waive={"gate_up_proj": reason})
    assert same_bits(loaded[1][GATE_UP].to_local(), whole[4:])
    assert reports[0].waived == {"gate_up_proj": reason}
    assert "declared as saved: 0 keys; 1 differ, waived" in str(reports[0])
    assert reason in str(reports[0])
    with pytest.raises(PlacementError, match="needs a reason"):
        PlacementLoadPlanner(waive={"w": ""})


def test_checkpoints_without_a_record_are_quiet(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "stock", no_dist=True)
    save_fused(tmp_path / "old", whole, "w")

    def drop(metadata: Metadata) -> None:
        del metadata.planner_data[RESERVED_KEY]

    edit_metadata(tmp_path / "old", drop)
    for name in ("stock", "old"):
        with without_warning():
            _, reports = load(WORLD, tmp_path / name, plain_w)
        assert reports[0].compared == "no record"


def test_a_record_of_other_keys_or_of_another_form_is_none(tmp_path: Path) -> None:
    save_fused(tmp_path, arange(8, 3), "w")

    def spoil(metadata: Metadata) -> None:
        metadata.planner_data[RESERVED_KEY]["cuts"]["keys"] = (1, 0)

    def garble(metadata: Metadata) -> None:
        metadata.planner_data[RESERVED_KEY]["cuts"] = {"groups": 5}

    for edit in (spoil, garble):
        edit_metadata(tmp_path, edit)
        with without_warning():
            _, reports = load(WORLD, tmp_path, plain_w)
        assert reports[0].compared == "no record"


def test_parts_that_alternate_row_by_row_in_an_older_record_are_a_plain_cut(tmp_path: Path) -> None:
    """Records of older saves have a sixth value in each cut: whether its parts alternate."""
    save_fused(tmp_path, arange(8, 3), "w")

    def alternate(metadata: Metadata) -> None:
        cuts = metadata.planner_data[RESERVED_KEY]["cuts"]
        cuts["groups"] = tuple(tuple((*cut[:5], True) for cut in each) for each in cuts["groups"])

    edit_metadata(tmp_path, alternate)
    with without_warning():
        _, reports = load(WORLD, tmp_path, plain_w)
    assert reports[0].compared == "declared as saved: 1 key"


# M43 and M49: the rename forgotten, or that of another rank.

EXPERTS = {
    f"layers.{layer}.experts.{e}.w": arange(2, 2, start=100 * layer + 10 * e)
    for layer in range(2)
    for e in range(4)
}


def local_experts(mine: list[int]) -> dict[str, Any]:
    """Return the state dict of a rank that numbers its experts from 0."""
    return {
        f"layers.{layer}.experts.{i}.w": EXPERTS[f"layers.{layer}.experts.{e}.w"].clone()
        for layer in range(2)
        for i, e in enumerate(mine)
    }


def owned(rank: int) -> list[int]:
    return [2 * rank, 2 * rank + 1]


def renumbered(mine: list[int], total: int | None = 4, pattern: str = "experts.{}") -> Renumber:
    return Renumber(pattern, mine, total=total)


def save_experts(path: Path, rename: Callable[[int], Any] = lambda r: renumbered(owned(r))) -> None:
    WORLD.save(
        path,
        lambda rank: local_experts(owned(rank)),
        lambda rank: PlacementSavePlanner(rename=rename(rank)),
    )


def load_experts(
    path: Path, world: World, state: Callable[[int], dict[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    """Load with options that may be functions of the rank; return the filled state dicts."""

    def planner(rank: int) -> PlacementLoadPlanner:
        mine = {k: v(rank) if k == "rename" else v for k, v in options.items()}
        return PlacementLoadPlanner(**mine)

    return world.load(path, lambda rank: blank(state(rank)), planner)


def by_function(rank: int) -> Callable[[str], str]:
    """Return a rename that only its caller understands."""
    mine = owned(rank)

    def rename(key: str) -> str:
        head, _, tail = key.partition(".experts.")
        number, _, rest = tail.partition(".")
        return f"{head}.experts.{mine[int(number)]}.{rest}"

    return rename


@pytest.mark.parametrize(
    "rename", [lambda r: renumbered(owned(r)), by_function, lambda r: renumbered(owned(r), None)]
)
def test_m43_a_per_expert_load_with_the_rename_forgotten_is_refused(
    tmp_path: Path, rename: Callable[[int], Any]
) -> None:
    save_experts(tmp_path, rename)
    with refused() as refusal:
        load_experts(tmp_path, WORLD, lambda rank: local_experts(owned(rank)))
    refusal.says(
        "layers.0-1.experts.{}: several ranks ask for 0-1 of it, and none for 2-3",
        "saved with:  rename=",
        "'experts.{}'",
        "this load:   no rename=",
        "asked for:   0-1 by ranks 0-1",
        "rename= was forgotten",
        "way out:     rename=, rows and meshes as in the save, on each rank its own",
        "waive={pattern: reason}",
    )


def by_ep(rank: int) -> Renumber:
    """Return the rename of a rank of ``edp`` by ``ep``, which are two each."""
    return renumbered(owned(rank % 2))


def test_m43_a_rank_without_the_rename_that_its_replicas_have_is_refused(tmp_path: Path) -> None:
    """All numbers are asked for, since a replica of that rank asks for its own."""
    save_experts(tmp_path)

    def state(rank: int) -> dict[str, Any]:
        return local_experts(owned(rank % 2))

    def load_with(rename: Callable[[int], Any], **options: Any) -> list[dict[str, Any]]:
        return load_experts(tmp_path, FOUR, state, rename=rename, **options)

    with refused() as refusal:
        load_with(lambda rank: None if rank == 1 else by_ep(rank))
    refusal.says(
        "layers.0-1.experts.{}: no rename= of rank 1 numbers it, as others do",
        "other ranks: rename=Renumber('experts.{}', total=4)",
    )
    with refused():  # of the layers it has one, which changes nothing
        layers = Renumber("layers.{}", [0, 1], total=2)
        load_with(lambda rank: layers if rank == 1 else Renames(layers, by_ep(rank)))
    load_with(lambda rank: None if rank == 1 else by_ep(rank), waive={"experts": "a test"})
    with without_warning():
        # Ranks whose numbers are those of the whole need none.
        loaded = load_with(lambda rank: by_ep(rank) if rank % 2 else None)
    for rank, one in enumerate(loaded):
        assert all(same_bits(one[fqn], value) for fqn, value in state(rank).items())


def test_a_rank_that_asks_for_all_numbers_needs_no_rename(tmp_path: Path) -> None:
    save_experts(tmp_path)

    def state(rank: int) -> dict[str, Any]:
        return local_experts(owned(rank)) if rank < 2 else dict(EXPERTS)

    with without_warning():
        loaded = load_experts(
            tmp_path, World(3), state, rename=lambda r: renumbered(owned(r)) if r < 2 else None
        )
    assert all(same_bits(loaded[2][fqn], value) for fqn, value in EXPERTS.items())


@pytest.mark.parametrize("options", [{}, {"optional": ["layers.*.experts.*.w"]}])
def test_m49_numbers_of_a_checkpoint_without_renames_are_divided_among_ranks(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """As that of one process that has the whole model, or of another trainer."""
    dcp.save(EXPERTS, checkpoint_id=tmp_path, no_dist=True)

    def state(rank: int) -> dict[str, Any]:
        return local_experts(owned(rank))

    with without_warning():
        states = load_experts(
            tmp_path, WORLD, state, rename=lambda rank: renumbered(owned(rank)), **options
        )
    for rank, loaded in enumerate(states):
        assert all(torch.equal(loaded[fqn], wanted) for fqn, wanted in state(rank).items())
    wrong = {"rename": lambda rank: renumbered(owned(0)), **options}
    if options:
        load_experts(tmp_path, WORLD, state, **wrong)
        return
    with refused() as refusal:
        load_experts(tmp_path, WORLD, state, **wrong)
    refusal.says(
        "layers.0-1.experts.{}: several ranks ask for 0-1 of it, and none for 2-3",
        "this load:   rename=Renumber('experts.{}', total=4)",
        "asked for:   0-1 by ranks 0-1",
        "the numbers of another rank",
        "way out:     rename=",
    )
    assert "saved with" not in refusal.text
    save_experts(tmp_path / "renamed")
    with refused() as refusal:
        load_experts(tmp_path / "renamed", WORLD, state, **wrong)
    refusal.says("none for 2-3", "saved with:  rename=Renumber('experts.{}', total=4)")


def test_m49_a_rename_with_another_total_is_refused(tmp_path: Path) -> None:
    save_experts(tmp_path)
    for pattern in ("experts.{}", "layers.*.experts.{}"):
        with refused() as refusal:
            load_experts(
                tmp_path,
                WORLD,
                lambda rank: local_experts([rank]),
                rename=lambda rank, p=pattern: renumbered([rank], 2, p),
            )
        refusal.says(
            f"{pattern}: this load has another Renumber of it than the save had",
            "saved with:  rename=Renumber('experts.{}', total=4)",
            "way out:     the rename= of the save",
        )


def test_m43_layers_of_stages_loaded_without_the_rename_are_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {f"layers.{i}.w": arange(2, start=10 * rank + i) for i in range(2)}

    WORLD.save(
        tmp_path,
        lambda rank: {f"stage{rank}": state(rank)},
        lambda rank: PlacementSavePlanner(
            rename=Renames(
                Renumber("layers.{}", [2 * rank, 2 * rank + 1], total=4),
                Replace(f"stage{rank}", "model"),
            )
        ),
    )
    with refused() as refusal:
        load_experts(tmp_path, WORLD, lambda rank: {"model": state(rank)})
    refusal.says("model.layers.{}: several ranks ask for 0-1 of it, and none for 2-3")


def test_right_loads_of_renamed_experts_are_quiet(tmp_path: Path) -> None:
    save_experts(tmp_path)
    with without_warning():
        # Each rank its own, by the rename of the save.
        loaded = load_experts(
            tmp_path,
            WORLD,
            lambda rank: local_experts(owned(rank)),
            rename=lambda rank: renumbered(owned(rank)),
        )
        for rank in range(2):
            assert_same(loaded[rank], local_experts(owned(rank)))
        # Twice as many ranks, and others than saved.
        loaded = load_experts(
            tmp_path,
            FOUR,
            lambda rank: local_experts([3 - rank]),
            rename=lambda rank: renumbered([3 - rank]),
        )
        for rank in range(4):
            assert_same(loaded[rank], local_experts([3 - rank]))
        # All of them on each rank, by the checkpoint's names.
        for world in (ONE, WORLD):
            loaded = load_experts(tmp_path, world, lambda rank: dict(EXPERTS))
            assert_same(loaded[0], EXPERTS)
        # Replicas of ranks that together have them all.
        load_experts(
            tmp_path,
            FOUR,
            lambda rank: local_experts(owned(rank % 2)),
            rename=lambda rank: renumbered(owned(rank % 2)),
        )

        # Names that are global on the ranks already, each rank its own.
        def own(rank: int) -> dict[str, Any]:
            return {k: v for k, v in EXPERTS.items() if int(k.split(".")[3]) in owned(rank)}

        loaded = load_experts(tmp_path, WORLD, own)
        for rank in range(2):
            assert_same(loaded[rank], own(rank))
        # One process takes a part of them by their names.
        one = {k: v for k, v in EXPERTS.items() if ".experts.2." in k}
        assert_same(load_experts(tmp_path, ONE, lambda rank: one)[0], one)

        # A stage has other layers than the next.
        def stage(rank: int) -> dict[str, Any]:
            return {k: v for k, v in EXPERTS.items() if k.startswith(f"layers.{rank // 2}")}

        loaded = load_experts(tmp_path, FOUR, stage)
        assert_same(loaded[3], stage(3))


def test_a_load_into_fewer_experts_is_quiet_when_optional_or_a_waiver_names_them(
    tmp_path: Path,
) -> None:
    save_experts(tmp_path)

    def first(rank: int) -> dict[str, Any]:
        return {k: v for k, v in EXPERTS.items() if int(k.split(".")[3]) < 2}

    with without_warning():
        for options in ({"optional": ["experts"]}, {"waive": {"experts": "a smaller model"}}):
            loaded = load_experts(tmp_path, WORLD, first, **options)
            assert_same(loaded[1], first(1))
            # Also where the rename says that there are fewer.
            load_experts(
                tmp_path,
                WORLD,
                lambda rank: local_experts([rank]),
                rename=lambda rank: renumbered([rank], 2),
                **options,
            )
    # Of other ranks other experts: nobody asks for what another asks for. It may be a mistake.
    with warned() as texts:
        load_experts(
            tmp_path,
            WORLD,
            lambda rank: {k: v for k, v in EXPERTS.items() if int(k.split(".")[3]) == rank},
        )
    assert ["no rank asks for: layers.0-1.experts.2-3.w" in text for text in texts] == [True]
    with refused() as refusal:
        load_experts(tmp_path, WORLD, first)
    refusal.says("several ranks ask for 0-1 of it, and none for 2-3", "optional=[pattern]")


def test_optimizer_state_that_some_experts_lack_is_no_gap(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        step = {"experts.0.w.step": torch.tensor(3.0)} if rank == 0 else {}
        weight = arange(2, start=rank)
        return {"model": {"experts.0.w": weight}, "optim": {"state": step}}

    WORLD.save(tmp_path, state, lambda rank: PlacementSavePlanner(rename=renumbered([rank], 2)))
    with without_warning():
        load_experts(tmp_path, WORLD, state, rename=lambda rank: renumbered([rank], 2))


# M47 and M48: the lint and the patterns that match nothing, at load as at save.


def test_m47_a_load_runs_the_lint_of_the_save_and_warns_once(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({GATE_UP: whole}, checkpoint_id=tmp_path, no_dist=True)
    with warned() as texts:
        _, reports = load(WORLD, tmp_path, plain_template)
    (text,) = texts
    assert "its name says several tensors in one, but 'tp' cuts it plainly" in text
    assert "FusedShard(0, 2)" in text
    assert "waive={pattern: reason}" in text
    assert [len(report.warnings) for report in reports] == [1, 1]
    with without_warning():
        load(WORLD, tmp_path, plain_template, waive={"gate_up_proj": "parts alternate by head"})


def test_m47_the_coordinator_tells_once_what_any_rank_found(tmp_path: Path) -> None:
    """Rank 0 holds none of these keys, ranks 1 and 2 the same one."""
    keys = [f"layers.{i}.mlp.gate_up_proj.weight" for i in range(2)]
    dcp.save({key: arange(8, 3) for key in (*keys, "w")}, checkpoint_id=tmp_path, no_dist=True)

    def state(rank: int) -> dict[str, Any]:
        if rank == 0:
            return {"w": torch.zeros(8, 3)}
        mesh = FOUR.mesh(rank, dp=2, tp=2)["tp"]
        return {keys[rank // 3]: FakeDTensor(torch.zeros(4, 3), mesh, [Shard(0)], (8, 3))}

    with warned() as texts:
        _, reports = load(FOUR, tmp_path, state)
    (text,) = texts
    assert text.startswith(
        "look at this load (1 note of 2 keys)\nlayers.0-1.mlp.gate_up_proj.weight: "
    )
    assert [len(report.warnings) for report in reports] == [0, 1, 1, 1]


def test_m48_a_pattern_that_matches_nothing_on_any_rank_is_warned_of_once(tmp_path: Path) -> None:
    whole = arange(8, 3)
    dcp.save({"a": whole, "b": whole}, checkpoint_id=tmp_path, no_dist=True)

    def rules(rank: int) -> PlacementRules:
        placement = CheckpointPlacement(WORLD.mesh(rank, tp=2), {"tp": Shard(0)})
        return PlacementRules({"a": placement, "b": placement, "expert.w": placement})

    def state(rank: int) -> dict[str, Any]:
        return {"ab"[rank]: torch.zeros(4, 3)}

    with warned() as texts:
        _, reports = load(WORLD, tmp_path, state, rules)
    (text,) = texts
    assert "'expert.w': no key on any rank matches" in text
    assert "way out:" in text
    assert reports[0].unmatched == ("'expert.w'",)
    assert "unmatched: 1: 'expert.w'" in str(reports[0])
    assert reports[1].unmatched == ()


def test_m48_a_rank_that_loads_by_itself_knows_nothing_of_others_keys(tmp_path: Path) -> None:
    dcp.save({"a": arange(8, 3)}, checkpoint_id=tmp_path, no_dist=True)
    rules = PlacementRules({"a": None, "b": None})
    planner = PlacementLoadPlanner(rules)
    with warned() as texts:
        dcp.load({"a": torch.zeros(8, 3)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert "'b': no key on any rank matches" in texts[0]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with without_warning(), FOUR._as(2):
        planner.set_up_planner({"a": torch.zeros(8, 3)}, metadata, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    assert planner.report.unmatched == ()


def load_alone(path: Path, rank: int, state: dict[str, Any], **options: Any) -> LoadReport:
    """Load as ``dcp.load(..., no_dist=True)`` does on a rank of the world; return its report."""
    planner, reader = PlacementLoadPlanner(**options), dcp.FileSystemReader(path)
    with WORLD._as(rank), without_warning():
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, True)
        local_plan = reader.prepare_local_plan(planner.create_local_plan())
        plans = reader.prepare_global_plan(planner.create_global_plan([local_plan]))
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    return planner.report


@pytest.mark.parametrize("rank", range(2))
def test_m43_a_rank_that_loads_alone_by_local_numbers_is_refused(tmp_path: Path, rank: int) -> None:
    save_experts(tmp_path)
    with pytest.raises(PlacementError) as refusal:
        load_alone(tmp_path, rank, blank(local_experts(owned(rank))))
    for text in (
        "layers.0-1.experts.{}: this load asks for 0-1 of it, and not for 2-3",
        f"asked for:   0-1 by rank {rank}",
        "saved with:  rename=Renumber('experts.{}', total=4)",
        "rename= was forgotten",
        "waive={pattern: reason}",
    ):
        assert text in str(refusal.value)
    with pytest.raises(PlacementError, match="rename= was forgotten"):
        # A rename that gives no numbers does not replace that of the save.
        load_alone(
            tmp_path, rank, blank(local_experts(owned(rank))), rename=Replace("module", "model")
        )
    state = blank(local_experts(owned(rank)))
    report = load_alone(tmp_path, rank, state, waive={"experts": "two of the four"})
    assert_same(state, local_experts([0, 1]))
    assert report.compared == "declared as saved, but not with what other ranks ask for"


def test_ranks_that_load_alone_with_their_numbers_or_all_are_quiet(tmp_path: Path) -> None:
    save_experts(tmp_path)
    for rank in range(2):
        state = blank(local_experts(owned(rank)))
        report = load_alone(tmp_path, rank, state, rename=renumbered(owned(rank)))
        assert_same(state, local_experts(owned(rank)))
        assert report.compared == "declared as saved, but not with what other ranks ask for"
        whole = blank(EXPERTS)
        load_alone(tmp_path, rank, whole)
        assert_same(whole, EXPERTS)
    second = {key: blank(whole) for key, whole in EXPERTS.items() if ".experts.3." in key}
    load_alone(tmp_path, 1, second)
    assert_same(second, {key: EXPERTS[key] for key in second})
