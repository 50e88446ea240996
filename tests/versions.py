"""What some tests need of a torch; whoever skips one says so."""

import pytest
import torch
from torch.torch_version import TorchVersion

meshes_say_their_rank = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="needs torch 2.13: before, a saved mesh does not say its rank",
)

passes_on_errors = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="needs torch 2.13: before, a load drops what read_metadata raises, which is logged",
)
