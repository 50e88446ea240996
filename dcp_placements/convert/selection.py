"""Which tensors of a checkpoint are the model's, and the model's names for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_placements.convert.sources import Source
from dcp_placements.errors import Fault, PlacementError, format_faults, format_names
from dcp_placements.offline.checkpoint import SourceTensor
from dcp_placements.offline.model_keys import model_tensors
from dcp_placements.offline.structure import structural_faults
from dcp_placements.transfer.world import matcher


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a checkpoint that are exported."""

    tensors: dict[str, SourceTensor]  # by the model's own names, in the checkpoint's order
    prefix: str  # the prefix of the names in the checkpoint's keys; may be empty
    left_out: tuple[str, ...]  # the checkpoint's other keys, sorted


def select(
    source: Source,
    *,
    prefix: str | None = None,
    optimizer: bool = False,
    exclude: Sequence[str] = (),
) -> Selection:
    """Return the tensors of the model, by the model's own names.

    Args:
        source: The tensors, and which others a checkpoint should have.
        prefix: The prefix of the model's names; keys without it are left out. By default that of
            the saved state dict: ``model`` for ``{"model": model.state_dict(), "rng": ...}``.
        optimizer: Whether to include optimizer state, under its key in the checkpoint.
        exclude: Patterns of keys to leave out, as in ``PlacementRules``.

    Raises:
        CannotLook: A pattern with an empty component.
        PlacementError: No tensor is left, or a selected tensor is not whole.
    """
    unwanted = [matcher(pattern) for pattern in exclude]
    _warn_unmatched(source, exclude)

    def is_excluded(fqn: str) -> bool:
        return any(matches(fqn) for matches in unwanted)

    tensors = {fqn: one for fqn, one in source.tensors.items() if not is_excluded(fqn)}
    saved = None if source.checkpoint is None else source.checkpoint.metadata.planner_data
    found = model_tensors(tensors, {**source.tensors, **source.objects}, saved, prefix)
    head, start = found.prefix, f"{found.prefix}." if found.prefix else ""
    selected = {**found.model, **(found.states if optimizer else {})}
    if not selected:
        raise PlacementError(
            f"{source.path}: none of its {len(source.tensors)} tensors is selected"
            + (f": no key begins with {start!r}" if tensors.keys() > found.states.keys() else "")
            + f"\n    it has:      {format_names(list(source.tensors), 4) or 'no tensors'}"
        )
    kept = {tensor.fqn for tensor in selected.values()}
    # Tensors that an index names and no file has.
    lost = {f for f in _absent(source) if f.startswith(start) and not is_excluded(f)}
    _check_whole(source, kept | lost)
    rest = sorted({*source.tensors, *source.objects} - kept)
    return Selection(selected, head, tuple(rest))


def _absent(source: Source) -> Mapping[str, str]:
    return {} if source.checkpoint is None else source.checkpoint.absent


def _warn_unmatched(source: Source, exclude: Sequence[str]) -> None:
    """Warn of the patterns that exclude no key."""
    keys = [*source.tensors, *source.objects, *_absent(source)]
    unmatched = [pattern for pattern in exclude if not any(map(matcher(pattern), keys))]
    if unmatched:
        note = Fault(
            ", ".join(map(repr, unmatched)),
            f"exclude= matches none of the {len(keys)} keys",
            ("way out:     correct the pattern, or drop it",),
        )
        warnings.warn(format_faults("look at this export", [note], "note"), stacklevel=4)


def _check_whole(source: Source, kept: set[str]) -> None:
    checkpoint, lines = source.checkpoint, []
    if checkpoint is None:
        return  # ranks' files were compared when they were put together
    for fault in structural_faults(checkpoint):
        names = [fqn for fqn in fault.tensors if fqn in kept]
        if names:
            lines.append(f"{format_names(names, 4)}: {fault.kind}: {fault.message}")
    if lines:
        raise PlacementError(
            f"{source.path}: the selected tensors are not whole\n    "
            + "\n    ".join(sorted(lines))
        )
