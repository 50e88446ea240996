"""The pages that messages name: the last line of a refusal that has a page.

page:        dcp_placements/guides/tied-weights.md
"""

from __future__ import annotations


def _page(name: str) -> str:
    return f"page:        dcp_placements/{name}"


COMPARISON_PAGE = _page("load/README.md#comparison-with-the-save")
KILLED_PAGE = _page("guides/production.md#the-job-was-killed")
KEEPING_PAGE = _page("guides/production.md#what-to-keep-and-what-may-go")
MESHES_PAGE = _page("guides/two-meshes.md")
MESSAGES_PAGE = _page("save/README.md#messages")
NAMES_PAGE = _page("names/README.md")
OPTIMIZERS_PAGE = _page("guides/optimizers.md")
QUANTIZED_PAGE = _page("guides/quantized.md")
STAGES_PAGE = _page("guides/pipeline-stages.md")
TIED_PAGE = _page("guides/tied-weights.md")
UNEVEN_PAGE = _page("guides/uneven-and-flat.md")
WHOLE_PAGE = _page("save/README.md#the-whole-model")
