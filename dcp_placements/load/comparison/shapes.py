"""One tensor's shape in the checkpoint compared with the one that a load needs."""

from __future__ import annotations

from collections.abc import Iterator

from dcp_placements.storage.metadata.record import Cuts


def shape_mismatch(
    stored: tuple[int, ...],
    needed: tuple[int, ...],
    needs: str,
    rule: str | None,
    cuts: tuple[Cuts, Cuts] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return headline and details of the fault that a tensor is stored in another shape.

    Args:
        stored: The checkpoint's shape.
        needed: The shape of the whole tensor that a local one and its rule make.
        needs: Who needs it, and the shape.
        rule: The name of the rule that applies; None where none does.
        cuts: Of the save and of the load; None where they are not recorded.
    """
    details = [] if cuts is None else list(_compared(*cuts))
    differing = [d for d, (a, b) in enumerate(zip(stored, needed, strict=False)) if a != b]
    as_saved = cuts is not None and cuts[0] == cuts[1] != ()
    if len(stored) == len(needed) and len(differing) == 1 and not as_saved:
        dim = differing[0]
        small, large = sorted((stored[dim], needed[dim]))
        if small and large % small == 0:
            details.append(_factor_text(dim, large // small, stored[dim] < needed[dim]))
    if rule is not None:
        details.append(f"by rule:     {rule}")
    details.append("way out:     build the model as it was saved, or correct the rule of this key")
    return (
        f"the checkpoint holds a {stored} tensor, but {needs} (torch: Size mismatch)",
        tuple(details),
    )


def _compared(saved: Cuts, loaded: Cuts) -> Iterator[str]:
    """Yield how the save and the load declare a key, and what follows from it."""
    for label, cuts in (("saved:", saved), ("this load:", loaded)):
        yield f"{label:<12} {', then '.join(map(str, cuts)) or 'whole, cut by no axis'}"
    dims = {cut.axis: cut.dim for cut in loaded}
    if any(cut.axis in dims and cut.dim != dims[cut.axis] for cut in saved):
        yield (
            "likely:      one of the two declares a wrong dim; if the save does, load as it was "
            "saved, on as many ranks, and save again with the right dim"
        )
    elif saved and saved == loaded:
        yield "likely:      a model of another size: the two declare the same cuts"


def _factor_text(dim: int, factor: int, stored_is_smaller: bool) -> str:
    larger, smaller, cause = "stored", "needed", "does this load lack a rule for it,"
    if stored_is_smaller:
        larger, smaller, cause = "needed", "stored", "saved without its placement"
    return (
        f"likely:      on dim {dim} the {larger} size is {factor} times the {smaller} one: {cause} "
        f"on an axis of size {factor}?"
    )
