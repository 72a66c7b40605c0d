"""Calls compile themselves: once for the same function with new numbers, and never from a stale one."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter
from tapeless import adjoint, sim, solvers

RATE = 0.5


def run(rate: Any, k: Any = 1.0, y0: Any = 1.0, **options: Any) -> float:
    span = {"t0": 0.0, "t1": 1.0, "dt": 0.1} | options
    return float(sim.simulate(rate, y0, k, method=sim.RK4(), **span).y_final)


def test_new_numbers_compile_nothing() -> None:
    """Assert one trace for 20 calls in which parameter, state and step change as Python and NumPy numbers."""
    counter = Counter()

    def rate(t: Any, y: Any, k: Any) -> Any:
        counter.traces += 1
        return -k * y

    for i in range(10):
        k, y0 = 0.1 + 0.05 * i, 1.0 + i
        got = run(rate, k, y0, t1=1.0 + i, dt=0.1 * (1 + i))
        assert got == pytest.approx(y0 * np.exp(-k * (1.0 + i)), rel=1e-2)
        run(rate, np.float64(k), np.float64(y0))
    assert counter.traces == 1


def test_fresh_lambdas_compile_nothing() -> None:
    """Assert that a new lambda with the same code and captures is the same function."""
    counter = Counter()

    def make() -> Any:
        return lambda t, y, k: (setattr(counter, "traces", counter.traces + 1), -k * y)[1]

    for k in (0.3, 0.4, 0.5):
        assert run(make(), k) == pytest.approx(np.exp(-k), rel=1e-5)
    assert counter.traces == 1


def test_what_a_function_captures_is_part_of_it() -> None:
    """Assert that changed globals, closures, defaults, lists, arrays, attributes and partials are never stale."""
    global RATE

    def of_global(t: Any, y: Any, k: Any) -> Any:
        return -RATE * y

    for RATE in (0.5, 0.9):
        assert run(of_global) == pytest.approx(np.exp(-RATE), rel=1e-5)
    box, array = [0.5], np.array([0.5])

    def of_containers(t: Any, y: Any, k: Any) -> Any:
        return -(box[0] + array[0]) * y

    for value in (0.2, 0.3):
        box[0], array[0] = value, 2 * value
        assert run(of_containers) == pytest.approx(np.exp(-3 * value), rel=1e-5)

    class Model:
        def __init__(self, k: float) -> None:
            self.k = k

        def rate(self, t: Any, y: Any, p: Any) -> Any:
            return -self.k * y

    model = Model(0.5)
    for model.k in (0.5, 0.9):
        assert run(model.rate) == pytest.approx(np.exp(-model.k), rel=1e-5)

    def scaled(scale: float, t: Any, y: Any, p: Any) -> Any:
        return -scale * y

    for scale in (0.5, 0.9):
        assert run(functools.partial(scaled, scale)) == pytest.approx(np.exp(-scale), rel=1e-5)


def test_many_captures_are_told_once() -> None:
    """Assert one warning for a function that closes over a new number at every call."""

    def make(k: float) -> Any:
        return lambda u, p: u - k * p

    def solve_many() -> None:
        for i in range(25):
            solvers.root_find(make(float(i)), 0.0, 1.0)

    with pytest.warns(UserWarning, match="Pass changing numbers through `params`") as caught:
        solve_many()
    assert len(caught) == 1


def test_float32_state_stays_float32() -> None:
    """Assert that a Python float among the parameters does not promote a float32 state."""
    y0 = jnp.ones(2, jnp.float32)
    final = sim.simulate(lambda t, y, k: -k * y, y0, 0.5, t0=0, t1=1, dt=0.1, method=sim.RK4()).y_final
    assert final.dtype == jnp.float32


def test_attributes_of_captured_objects_are_never_stale() -> None:
    """Assert that objects, classes, modules, slots, containers and wrapped functions are compared by what they hold."""
    import types

    import jax

    class Settings:
        k = 1.0

    class Slotted:
        __slots__ = ("k",)

    class Callable:
        def __init__(self) -> None:
            self.k = 1.0

        def __call__(self, t: Any, y: Any, p: Any) -> Any:
            return -self.k * y

    def scaled(k: float) -> Any:
        return lambda y: -k * y

    space, module = types.SimpleNamespace(k=1.0), types.ModuleType("settings")
    slotted, functions, outer = Slotted(), [scaled(1.0)], types.SimpleNamespace(inner=Settings())
    module.k = slotted.k = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    rate, box, kinds = Callable(), [1.0], {1.0}
    force = jax.grad(lambda q: 0.5 * box[0] * q**2)
    cases = [
        (lambda t, y, p: -space.k * y, lambda: setattr(space, "k", 2.0)),
        (lambda t, y, p: -Settings.k * y, lambda: setattr(Settings, "k", 2.0)),
        (lambda t, y, p: -outer.inner.k * y, lambda: setattr(outer.inner, "k", 3.0)),
        (lambda t, y, p: -module.k * y, lambda: setattr(module, "k", 2.0)),
        (lambda t, y, p: -slotted.k * y, lambda: setattr(slotted, "k", 2.0)),
        (lambda t, y, p: functions[0](y), lambda: functions.__setitem__(0, scaled(2.0))),
        (lambda t, y, p: -max(kinds) * y, lambda: kinds.add(2.0)),
        (lambda t, y, p: -force(y), lambda: box.__setitem__(0, 2.0)),
        (rate, lambda: setattr(rate, "k", 2.0)),
    ]
    for function, change in cases:
        before = run(function)
        change()
        assert run(function) < 0.7 * before


def test_counters_do_not_compile_again() -> None:
    """Assert that what tracing itself changes (a global, a list, an attribute) is no reason to trace again."""
    count, calls = {"n": 0}, []

    def rate(t: Any, y: Any, k: Any) -> Any:
        count["n"] += 1
        calls.append(1)
        return -k * y

    for k in (0.1, 0.2, 0.3):
        run(rate, k)
    assert (count["n"], len(calls)) == (1, 1)


def test_a_traced_attribute_is_differentiated() -> None:
    """Assert the gradient with respect to a value that reaches the rate through an object."""
    import types

    import jax

    model = types.SimpleNamespace(k=0.0)

    def final(k: Any) -> Any:
        model.k = k
        return sim.simulate(lambda t, y, p: -model.k * y, 1.0, t0=0, t1=1, dt=0.1, method=sim.RK4()).y_final

    assert float(jax.grad(final)(0.5)) == pytest.approx(-np.exp(-0.5), rel=1e-5)


def test_flags_are_static() -> None:
    """Assert that a boolean parameter decides in Python."""
    rate = lambda t, y, p: -y if p["decays"] else y
    assert run(rate, {"decays": True}) < 1 < run(rate, {"decays": False})


SCALE = 2.0


def scaled(u: Any) -> Any:
    """Read a global."""
    return SCALE * u


def test_nodes_hold_what_their_functions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a changed global is seen through a node that a residual calls."""
    node = adjoint.node("scaled", scaled, jvp=lambda args, out, t: SCALE * t[0], host=False)
    root = lambda: float(solvers.root_find(lambda u, p: node(u) - p, 1.0, 6.0).value)
    assert root() == 3.0
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert root() == 2.0
