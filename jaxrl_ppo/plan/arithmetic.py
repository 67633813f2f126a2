"""Floating-point operations of a traced program's matrix products, over all devices, loops counted by their trips."""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core

# Matrix products of size [S, S, head size] in each of splash attention's kernels, over the causal half.
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}


def matrix_flops(jaxpr: Any, experts: int = 0) -> float:
    """Two per multiply-add of every matrix product in a Jaxpr, recomputation included, as the program is written.

    Attention in splash kernels counts its causal half. Of a conditional, the branch with the most. A ragged product
    with the kernels of some of a model's `experts` (0: of all) multiplies the rows that an even load gives to those.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            ((contracted, _), _) = parameters["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif name == "ragged_dot_general":
            total += _ragged(equation, experts)
        elif name == "pallas_call":
            total += _splash(str(parameters.get("name") or parameters.get("name_and_src_info")), equation)
        else:
            inner = [matrix_flops(found, experts) for value in parameters.values() for found in _jaxprs(value)]
            combined = max(inner, default=0.0) if name == "cond" else sum(inner)
            times = parameters["length"] if name == "scan" else 1
            if name == "shard_map":  # written for one device, run by all of them
                times = math.prod(parameters["mesh"].shape.values())
            total += times * combined
    return total


def _ragged(equation: Any, experts: int) -> float:
    """Of rows sorted by group: each is multiplied with one group's matrix, so the number of groups is no factor."""
    left, right, sizes = (variable.aval.shape for variable in equation.invars[:3])
    numbers = equation.params["ragged_dot_dimension_numbers"]
    ((_, contracted), (_, batch)) = numbers.dot_dimension_numbers
    passed = {*contracted, *batch, *numbers.rhs_group_dimensions}
    columns = math.prod(size for axis, size in enumerate(right) if axis not in passed)
    share = sizes[-1] / experts if experts else 1.0
    return 2.0 * math.prod(left) * columns * share


def _splash(name: str, equation: Any) -> float:
    kind = next((kind for kind in SPLASH_PRODUCTS if f"_{kind}_" in name), None)
    if kind is None:
        return 0.0
    shapes = [variable.aval.shape for variable in equation.invars if len(variable.aval.shape) >= 3]
    *outer, length, head_dim = max(shapes, key=math.prod)
    return float(SPLASH_PRODUCTS[kind] * math.prod(outer) * length * length * head_dim)


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    if isinstance(value, tuple | list):
        return [found for each in value for found in _jaxprs(each)]
    return []
