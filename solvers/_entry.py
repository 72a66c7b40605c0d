"""The way in and out of every solve: compiled once, failures raised, derivatives guarded."""

from collections.abc import Callable
from typing import Any

import equinox as eqx

from ..adjoint._compile import call_compiled
from ..adjoint._gate import Gates, hoisted_if_differentiated
from ..adjoint._guard import guard_tangents
from ..adjoint._status import raise_if_failed
from ._solution import Solution


def run(
    implementation: Callable[..., Any],
    function: Any,
    inputs: Any,
    methods: Any,
    *,
    example: tuple[Any, ...],
    throw: bool,
    **options: Any,
) -> Solution:
    """`implementation(function, inputs, arrays, methods=static, **options) -> (value, status, stats)` as a `Solution`.

    `function` is the user's; `example` are arguments for it. `methods` are split into their arrays, which may change
    without a new compilation, and the rest.
    """
    what = implementation.__name__.strip("_")
    arrays, static = eqx.partition(methods, eqx.is_array)
    gates = Gates(what)
    if throw:
        function, inputs = gates.inputs((hoisted_if_differentiated(function, *example), inputs))
    value, status, stats = call_compiled(implementation, (function, inputs, arrays), methods=static, **options)
    if throw:
        value = gates.outputs(raise_if_failed(value, status, what))
    return Solution(guard_tangents(value, status, what), status, stats)
