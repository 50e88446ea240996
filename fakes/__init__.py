"""Worlds of many ranks in one process, to try rules and planners without a cluster.

``FakeMesh`` and ``FakeDTensor`` stand for a ``DeviceMesh`` and a ``DTensor`` on any rank;
``World`` runs N ranks through DCP's own order of calls, with torch's real file writer and reader;
``cut`` is plain slicing of the whole tensor, the truth that a shard is compared with.
"""

from fakes.mesh import FakeMesh
from fakes.reference import cut
from fakes.tensor import FakeDTensor, real_dtensor
from fakes.world import World

__all__ = ["FakeDTensor", "FakeMesh", "World", "cut", "real_dtensor"]
