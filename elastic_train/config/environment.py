"""torchft's environment variables: the one place that reads them.

torchft lets them override what its constructors are told. Taken into the config instead, they are checked
with it, are recorded with the run, and hold in every process of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic_train.config.layers import Given, Layer, described

VARIABLES: dict[str, str] = {
    "TORCHFT_LIGHTHOUSE": "lighthouse.address",
    "TORCHFT_TIMEOUT_SEC": "diloco.timeout_s",
    "TORCHFT_QUORUM_TIMEOUT_SEC": "diloco.quorum_timeout_s",
    "TORCHFT_CONNECT_TIMEOUT_SEC": "diloco.connect_timeout_s",
    "TORCHFT_QUORUM_RETRIES": "diloco.quorum_retries",
    "TORCHFT_MANAGER_PORT": "diloco.manager_port",
}
_TEXT = frozenset({"TORCHFT_LIGHTHOUSE"})


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The settings that torchft's variables give. torchft reads only whole numbers, so does this."""
    layer = Layer()
    for variable, key in VARIABLES.items():
        text = environ.get(variable)
        if text is None or (variable in _TEXT and not text):
            continue
        if variable in _TEXT:
            layer.given[key] = Given(text, variable)
        elif text.strip().isdecimal():
            layer.given[key] = Given(int(text), variable)
        else:
            layer.problems.append(f"{variable} in the environment wants a whole number, got {described(text)}")
    return layer
