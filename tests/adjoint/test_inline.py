"""Nested calls of `jit`, opened."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal
from tapeless.adjoint._inline import inlined


@jax.jit
def swirl(x: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Call nested functions, twice the same, and return an argument as it came."""
    inner = jax.jit(lambda a: jnp.clip(a * k, -1.0, 1.0))
    return jnp.cross(inner(inner(x)), k), x


def test_opening_changes_no_value_and_leaves_no_call() -> None:
    """Assert that values and derivatives are the same bit for bit, and that no call is left."""
    x, k = jnp.array([0.3, -1.2, 0.7]), jnp.array([1.1, 0.4, -0.9])
    closed = jax.make_jaxpr(lambda x: (swirl(x, k), swirl(2 * x, k), 3.0))(x)
    opened = inlined(closed)
    assert {"jit", "pjit"}.isdisjoint(eqn.primitive.name for eqn in opened.jaxpr.eqns)
    assert opened.out_avals == closed.out_avals
    for a, b in zip(jex.jaxpr_as_fun(closed)(x), jex.jaxpr_as_fun(opened)(x), strict=True):
        assert_array_equal(a, b)
    jacobians = [jax.jacrev(lambda x, f=f: jex.jaxpr_as_fun(f)(x)[0])(x) for f in (closed, opened)]
    assert_array_equal(*jacobians)


def test_a_call_that_places_its_arrays_stays() -> None:
    """Assert that a nested `jit` with shardings is left as it is; and that a function without calls is returned."""
    sharding = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec("x"))
    placed = jax.jit(lambda x: 2 * x, in_shardings=sharding)
    closed = jax.make_jaxpr(lambda x: placed(x) + 1)(jnp.ones(3))
    assert inlined(closed) is closed
    plain = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(3))
    assert inlined(plain) is plain
