"""The Llama 3 models that a config can name: torchtitan's flavors and one that is smaller than all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, compute_ffn_hidden_dim
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import llama3_configs, model_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from elastic_train.config import ConfigError

TINY_VOCABULARY = 2048


def model_spec(flavor: str) -> ModelSpec:
    """The model of a flavor, ready for this process's device.

    On CPU only scaled-dot-product attention trains (flex attention has no backward there, varlen no kernel); it
    knows no document mask, so attention crosses the borders of packed documents.

    Raises:
        ConfigError: no such flavor.
    """
    if flavor == "tiny":
        spec = dataclasses.replace(model_registry("debugmodel"), flavor="tiny", model=_tiny())
    elif flavor in llama3_configs:
        spec = model_registry(flavor)
    else:
        raise ConfigError(f"model.flavor: no Llama 3 flavor {flavor!r}; there are tiny, {', '.join(llama3_configs)}")
    if fixes.DEVICE.kind == "cpu":
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(spec, parallelize_fn=_without_premul_sum(spec.parallelize_fn))


def _without_premul_sum(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """gloo has no PREMUL_SUM, which FSDP uses to average: sum and divide instead."""

    def parallelized(model: nn.Module, **settings: Any) -> nn.Module:
        model = parallelize(model, **settings)
        if fixes.DEVICE.backend == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


def _tiny() -> Llama3Model.Config:
    """Two layers of width 64: a quarter of a million parameters, most of them in the embeddings."""
    dim, heads = 64, 4
    linear = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    output = {"weight": partial(nn.init.trunc_normal_, std=dim**-0.5), "bias": nn.init.zeros_}
    norm = {"weight": nn.init.ones_}
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
            ffn_norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=None,
                wqkv_param_init=linear,
                wo_param_init=linear,
                inner_attention=get_attention_config("flex"),
                fuse_qkv=True,
                rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=8192, theta=500000, scaling="llama"),
            ),
            feed_forward=make_ffn_config(
                dim=dim,
                hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=64),
                w1_param_init=linear,
                w2w3_param_init=linear,
            ),
        )
        for _ in range(2)
    ]
    return Llama3Model.Config(
        dim=dim,
        vocab_size=TINY_VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=TINY_VOCABULARY,
            embedding_dim=dim,
            param_init={"weight": partial(nn.init.normal_, std=1.0)},
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
        lm_head=Linear.Config(in_features=dim, out_features=TINY_VOCABULARY, param_init=output),
        layers=layers,
    )
