"""Collectives over axes of the device mesh, inside `jax.shard_map`.

An axis that has one device, or that is not bound (a whole-sequence forward, training), costs nothing: XLA would keep
an all-reduce over one device. So the same code runs on one device and on many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Axes = str | tuple[str, ...]


def _present(axes: Axes) -> tuple[str, ...]:
    """Those of the axes that have more than one device."""
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if _size(name) > 1)


def _size(name: str) -> int:
    try:
        return jax.lax.axis_size(name)
    except NameError:  # not inside shard_map
        return 1


def size(axes: Axes) -> int:
    """How many devices the axes have together."""
    names = (axes,) if isinstance(axes, str) else axes
    total = 1
    for name in names:
        total *= _size(name)
    return total


def index(axes: Axes) -> jax.Array | int:
    """Which of them this device is; the first axis counts most. A plain 0 where there is one."""
    names = _present(axes)
    return jax.lax.axis_index(names) if names else 0


def psum(x: jax.Array, axes: Axes) -> jax.Array:
    names = _present(axes)
    return jax.lax.psum(x, names) if names else x


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
    names = _present(axes)
    return jax.lax.pmax(x, names) if names else x


def all_gather(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
    """Every device's `x`, joined along array axis `axis`."""
    names = _present(axes)
    return jax.lax.all_gather(x, names, axis=axis, tiled=True) if names else x


def psum_scatter(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
    """The sum over devices, of which each keeps its part of array axis `axis`."""
    names = _present(axes)
    return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True) if names else x


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """x [devices, ...]: part d goes to device d; returns what each device sent here, in their order."""
    names = _present(axes)
    return jax.lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True) if names else x


def shift(x: jax.Array, name: str) -> jax.Array:
    """The `x` of the device before this one on axis `name`; zeros on the first."""
    num = size(name)
    if num == 1:
        return jnp.zeros_like(x)
    return jax.lax.ppermute(x, name, [(i, i + 1) for i in range(num - 1)])


def local_part(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
    """This device's part of array axis `axis` of an `x` that all devices hold whole."""
    num = size(axes)
    if num == 1:
        return x
    width = x.shape[axis] // num
    return jax.lax.dynamic_slice_in_dim(x, index(axes) * width, width, axis=axis)
