"""The mesh's axes, and which of them the model's collectives run over."""

from __future__ import annotations

STAGE, DATA, MODEL, KV = "stage", "data", "model", "kv"
MESH_AXES = (STAGE, DATA, MODEL, KV)
SHARD = (MODEL, KV)  # the devices of one data shard: they have the same tokens and split the weights
ALL = (DATA, MODEL, KV)  # the devices that experts may be spread over
