"""Ranks meet by a store that is there before torch.distributed asks for one."""

import subprocess
import sys

PROGRAM = """
import os
import torch.distributed as dist
from elastic_train.replica.meeting import expect_store, open_store

store = open_store("127.0.0.1")
expect_store()
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
# Somebody else has the port, as far as whoever would open it is concerned.
dist.init_process_group("gloo")
print(dist.get_world_size(), store.num_keys() > 1)
dist.destroy_process_group()
"""


def test_torch_distributed_uses_the_store_that_holds_its_port() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_stores_of_several_replicas_never_share_a_port() -> None:
    program = (
        "from elastic_train.replica.meeting import open_store\n"
        "stores = [open_store('127.0.0.1') for _ in range(20)]\n"
        "print(len({store.port for store in stores}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["20"], done.stderr
