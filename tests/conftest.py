"""For all tests."""

from __future__ import annotations

import torch

# The models are tiny: a second thread costs them more than it gives, most of all beside other work.
torch.set_num_threads(1)
