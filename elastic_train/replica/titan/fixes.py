"""Makes torchtitan 0.3.0 run on the torch and the device at hand. Import it before anything else of torchtitan.

Other torchtitan modules bind the device's name and module when they are imported, so both are set here first.
"""

from __future__ import annotations

import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch.distributed import distributed_c10d

from elastic_train.device import detect

DEVICE = detect()

titan_utils.device_type = DEVICE.type
titan_utils.device_module = DEVICE.module

if not hasattr(dist, "set_timeout"):
    # torchtitan 0.3.0 calls a function that torch has from 2.14 on; before, it had this private name.
    dist.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
