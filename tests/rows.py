"""One replica's metadata, as tests begin with it."""

from elastic_train.diloco.metadata import Row

NEWEST = 6
ROW = Row(
    outer_step=NEWEST,
    tokens=10,
    weight_tokens=10,
    finite=True,
    state_hash=1,
    slot=0,
    incarnation=0,
    step_us=1,
    config_digest=1,
    layout_digest=1,
    id_base=0,
    loss=1.0,
    grad_norm=1.0,
    inner_steps=5,
    retired=0,
)
