import datasets.exceptions
import pyarrow
import pytest
import torch
import torch.distributed as dist

from elastic_train.config import ConfigError, EnvironmentProblem
from elastic_train.diloco.control import ReplicaBroken
from elastic_train.diloco.engine import Diverged, ForeignReplica, NonFinite, NoPeerState, SyncFailed
from elastic_train.events import CAUSES
from elastic_train.peer_ckpt.directory import RegistryUnreachable
from elastic_train.peer_ckpt.shards import StateMismatch
from elastic_train.replica.data.sources import DataError
from elastic_train.replica.faults import InjectedError
from elastic_train.replica.watch.causes import of_exception

CONNECTION_CLOSED = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConfigError("model.flavor: no Llama 3 flavor"), "config_error"),
        (EnvironmentProblem("lighthouse.port = 1 cannot be used"), "config_error"),
        (StateMismatch("0.weight has shape (2,), not (4,)"), "heal_failed"),
        (NoPeerState("no member has state"), "heal_failed"),
        (SyncFailed("11 syncs failed in a row"), "comm_error"),
        (ReplicaBroken("rank 3 did not answer"), "comm_error"),
        (RegistryUnreachable("replica 1 could not be registered"), "comm_error"),
        (Diverged("this replica's state is diverged"), "diverged"),
        (ForeignReplica("replica 1 has another config; socket closed"), "diverged"),
        (NonFinite("no replica's parameters are finite at step 7"), "non_finite"),
        (dist.DistBackendError("watchdog"), "comm_error"),
        (dist.DistNetworkError("no route"), "comm_error"),
        (RuntimeError(CONNECTION_CLOSED), "comm_error"),
        (RuntimeError("NCCL communicator was aborted on rank 3"), "comm_error"),
        (ConnectionResetError(104, "Connection reset by peer"), "comm_error"),
        (TimeoutError("timed out waiting for quorum"), "comm_error"),
        (torch.AcceleratorError("an illegal memory access was encountered", 700), "device_error"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device_error"),
        (RuntimeError("HIP error: invalid device function"), "device_error"),
        (RuntimeError("Loss is not finite at step 7"), "non_finite"),
        (DataError("the dataset ended at step 7 of 9"), "data_error"),
        (DataError("the connection to the hub was reset: socket closed"), "data_error"),
        (datasets.exceptions.DatasetNotFoundError("no such dataset"), "data_error"),
        (pyarrow.ArrowInvalid("Parquet magic bytes not found"), "data_error"),
        (InjectedError("injected by 0.0@5:exception"), "exception"),
        (ValueError("socket"), "exception"),
        (FileNotFoundError(2, "No such file or directory"), "exception"),
        (torch.OutOfMemoryError("CUDA out of memory"), "exception"),
        (KeyboardInterrupt(), "exception"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_cause(error: BaseException, cause: str) -> None:
    assert of_exception(error) == cause
    assert cause in CAUSES
