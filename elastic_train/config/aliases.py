"""torchtitan's names for what are keys of ours.

Within one source, an alias and our key may both be given only if they agree; between sources the usual order
holds, so a flag overrides an alias in the file. What was taken over is removed, so that the resolved config
says it once.
"""

from __future__ import annotations

from elastic_train.config.keys import keys
from elastic_train.config.layers import Given, Layer
from elastic_train.config.toml_text import value_text

SWITCH = "fault_tolerance.enable"

# Under the switch, these stand for our keys.
_FAULT_TOLERANCE: dict[str, str] = {
    "fault_tolerance.process_group": "diloco.backend",
    "fault_tolerance.process_group_timeout_ms": "diloco.timeout_s",
    "fault_tolerance.group_size": "orchestrator.replicas",
    "fault_tolerance.min_replica_size": "lighthouse.min_replicas",
    "fault_tolerance.sync_steps": "diloco.sync_every",
    "fault_tolerance.num_fragments": "diloco.fragments",
    "fault_tolerance.fragment_sync_delay": "diloco.overlap_steps",
    "fault_tolerance.fragment_update_alpha": "diloco.merge_alpha",
    "fault_tolerance.should_quantize": "diloco.compression",
}
_ALWAYS: dict[str, str] = {"model.tokenizer_path": "model.hf_assets_path"}
_REPLICA_ID = "fault_tolerance.replica_id"
_GROUP_SIZE = "fault_tolerance.group_size"
_SHOULD_QUANTIZE = "fault_tolerance.should_quantize"


def resolve(layer: Layer, *, fault_tolerance: bool) -> tuple[Layer, list[str]]:
    """The layer with aliases replaced by our keys, and what a person should know about it."""
    given, problems, notes = dict(layer.given), list(layer.problems), list[str]()
    in_force = _ALWAYS | (_FAULT_TOLERANCE if fault_tolerance else {})
    for alias, key in in_force.items():
        if alias not in given or (alias == _SHOULD_QUANTIZE and not isinstance(given[alias].value, bool)):
            # Neither true nor false is refused under its own name: "int8" is a value of our key alone.
            continue
        source = given.pop(alias)
        if alias == _GROUP_SIZE and source.value == 0 and source.value is not False:
            continue
        meant = Given(_converted(alias, source.value), source.name, source.where)
        ours = given.setdefault(key, meant)
        if ours.value != meant.value:
            problems.append(
                f"{source}: {alias} = {value_text(source.value)} is another name of {key}, which is given as "
                f"{value_text(ours.value)}; keep one of them"
            )
        notes.append(f"{alias} = {value_text(source.value)} is taken as {key} = {value_text(meant.value)}")
    if fault_tolerance and _REPLICA_ID in given:
        identity = given.pop(_REPLICA_ID)
        notes.append(f"{_REPLICA_ID} = {value_text(identity.value)} is not used: the orchestrator numbers the replicas")
    idle = [
        key for key, source in given.items() if key.startswith("fault_tolerance.") and keys()[key].differs(source.value)
    ]
    if idle and not fault_tolerance:
        notes.append(f"not in force without {SWITCH} = true: {', '.join(idle)}")
    return Layer(given, problems), notes


def _converted(alias: str, value: object) -> object:
    """Milliseconds become seconds, quantizing becomes a format; a value of the wrong type stays, to be refused with
    all the others."""
    if alias == _SHOULD_QUANTIZE:
        return "int8" if value else "none"
    if alias.endswith("_ms") and isinstance(value, int) and not isinstance(value, bool):
        return value / 1000
    return value
