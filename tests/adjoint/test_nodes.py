"""One table of nodes through every transformation, each against plain JAX on the unrolled computation."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from tapeless import checkpointing, sim, solvers

A = jnp.array([[4.0, 1.0, 0.3], [1.0, 3.0, -0.5], [0.3, -0.5, 2.0]])
STATIC = {"name": "cubic", "shape": jnp.sin, "nothing": None, "index": jnp.array([2, 0, 1]), "count": 2}


class Node(NamedTuple):
    """A computation by nodes, the same one unrolled, and a generic point. Both map a vector of 3 to a vector of 3."""

    by_node: Callable[[Any], Any]
    unrolled: Callable[[Any], Any]
    at: Any


def cubic(u: Any, params: Any) -> Any:
    """A root problem on a pytree, with integer, None, string and function leaves among its parameters."""
    p = params["p"][params["index"]]
    return {
        "a": u["a"] ** 3 + params["count"] * u["a"] + A[0, 1] * params["shape"](u["b"]) - p[:2],
        "b": u["b"] - p[2:] ** 2,
    }


def root_node(p: Any) -> Any:
    guess = {"a": jnp.full(2, 0.5), "b": jnp.zeros(1)}
    u = solvers.root_find(cubic, guess, {"p": p, **STATIC}, solvers.Newton(rtol=1e-14, atol=1e-14)).value
    return jnp.concatenate([u["a"], u["b"]])


def root_unrolled(p: Any) -> Any:
    u = jnp.array([0.5, 0.5, 0.0])

    def f(u: Any) -> Any:
        out = cubic({"a": u[:2], "b": u[2:]}, {"p": p, **STATIC})
        return jnp.concatenate([out["a"], out["b"]])

    for _ in range(6):
        u = u - jnp.linalg.solve(jax.jacfwd(f)(u), f(u))
    return u


def linear_node(method: Any, p: Any) -> Any:
    matrix = A + 0.3 * jnp.outer(p, p)
    return solvers.linear_solve(lambda v: matrix @ v, jnp.sin(p) + 1, method).value


def linear_unrolled(p: Any) -> Any:
    return jnp.linalg.solve(A + 0.3 * jnp.outer(p, p), jnp.sin(p) + 1)


def loop(scan: Any, p: Any) -> Any:
    """A loop with closed-over parameters, a pytree with an integer for a state, inputs and outputs."""

    def step(carry: Any, x: Any) -> Any:
        u, count = carry["u"], carry["count"]
        u = jnp.tanh(A @ u * p) + x * jnp.sin(u + count)
        return {"u": u, "count": count + 1}, (u * x, count)

    xs = jnp.linspace(0.1, 0.5, 7) * p[0]
    carry, (ys, counts) = scan(step, {"u": p, "count": jnp.int32(0)}, xs)
    return carry["u"] + jnp.sum(ys * jnp.cos(counts)[:, None], 0)


def pendulum(t: Any, y: Any, params: Any) -> Any:
    return {
        "q": y["v"],
        "v": -params[0] * jnp.sin(y["q"]) - params[1] * y["v"] + A[0, 2] * jnp.cos(params[2] * t),
    }


def simulated(method: Any, p: Any) -> Any:
    run = sim.simulate(
        pendulum,
        {"q": p[:1], "v": p[1:2]},
        p,
        t0=0.0,
        t1=0.5,
        dt=0.1,
        method=method,
        save_at=np.array([0.2, 0.5]),
        checkpoint=2,
    )
    return jnp.concatenate([run.y["q"][0], run.y["v"][1], run.y_final["q"]])


def simulated_unrolled(step: Any, p: Any) -> Any:
    y = jnp.stack([p[0], p[1]])

    def f(t: Any, y: Any) -> Any:
        out = pendulum(t, {"q": y[0], "v": y[1]}, p)
        return jnp.stack([out["q"], out["v"]])

    saved = []
    for i in range(5):
        y = step(f, 0.1 * i, 0.1, y)
        saved.append(y)
    return jnp.stack([saved[1][0], saved[4][1], y[0]])


def rk4(f: Any, t: Any, h: Any, y: Any) -> Any:
    a = f(t, y)
    b = f(t + h / 2, y + h / 2 * a)
    c = f(t + h / 2, y + h / 2 * b)
    return y + h / 6 * (a + 2 * b + 2 * c + f(t + h, y + h * c))


def midpoint(f: Any, t: Any, h: Any, y: Any) -> Any:
    def g(u: Any) -> Any:
        return u - y - h * f(t + h / 2, (u + y) / 2)

    u = y
    for _ in range(4):
        u = u - jnp.linalg.solve(jax.jacfwd(g)(u), g(u))
    return u


POINT = jnp.array([0.7, -0.4, 1.3])
NODES = {
    "root": Node(root_node, root_unrolled, POINT),
    "lu": Node(partial(linear_node, solvers.LU()), linear_unrolled, POINT),
    "cg": Node(partial(linear_node, solvers.CG(rtol=1e-14)), linear_unrolled, POINT),
    "scan": Node(partial(loop, partial(checkpointing.scan, checkpoint=3)), partial(loop, lax.scan), POINT),
    "simulate": Node(partial(simulated, sim.RK4()), partial(simulated_unrolled, rk4), POINT),
    "implicit": Node(partial(simulated, sim.ImplicitMidpoint()), partial(simulated_unrolled, midpoint), POINT),
}


def scalar(f: Any) -> Any:
    return lambda p: jnp.sum(jnp.sin(f(p)) * jnp.array([1.0, -0.6, 0.8]))


def batch(p: Any) -> Any:
    return jnp.stack([p, 0.9 * p + 0.1, p[::-1]])


def sharded(f: Any, p: Any) -> Any:
    """The gradient inside shard_map, one lane a device, parameters replicated into the closure of a sum."""
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("lanes")
    mapped = jax.shard_map(lambda block: jax.grad(scalar(f))(block[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped(batch(p)[:2])


def under_jit_sharding(f: Any, p: Any) -> Any:
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))
    lanes = jax.lax.with_sharding_constraint(batch(p)[:2], NamedSharding(mesh, PartitionSpec("lanes")))
    return jax.vmap(jax.grad(scalar(f)))(lanes)


TRANSFORMS = {
    "value": lambda f, p: f(p),
    "grad": lambda f, p: jax.grad(scalar(f))(p),
    "eager_grad": lambda f, p: jax.grad(scalar(f))(p),
    "vjp": lambda f, p: jax.vjp(f, p)[1](jnp.array([0.3, 1.0, -2.0])),
    "jvp": lambda f, p: jax.jvp(f, (p,), (jnp.array([0.3, 1.0, -2.0]),)),
    "linearize": lambda f, p: jax.linearize(f, p)[1](jnp.array([0.3, 1.0, -2.0])),
    "jacfwd": lambda f, p: jax.jacfwd(f)(p),
    "jacrev": lambda f, p: jax.jacrev(f)(p),
    "vmap": lambda f, p: jax.vmap(f)(batch(p)),
    "vmap_grad": lambda f, p: jax.vmap(jax.grad(scalar(f)))(batch(p)),
    "grad_vmap": lambda f, p: jax.grad(lambda b: jnp.sum(jax.vmap(scalar(f))(b)))(batch(p)),
    "vmap_jvp": lambda f, p: jax.vmap(lambda q: jax.jvp(f, (q,), (q,)))(batch(p)),
    "jvp_vmap": lambda f, p: jax.jvp(jax.vmap(f), (batch(p),), (batch(p)[::-1],)),
    "forward_over_reverse": lambda f, p: jax.hessian(scalar(f))(p),
    "reverse_over_forward": lambda f, p: jax.jacrev(jax.jacfwd(scalar(f)))(p),
    "reverse_over_reverse": lambda f, p: jax.jacrev(jax.grad(scalar(f)))(p),
    "checkpoint": lambda f, p: jax.grad(jax.checkpoint(scalar(f)))(p),
    "shard_map": sharded,
    "sharded_jit": under_jit_sharding,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("node", NODES)
def test_node_under_transformation(node: str, transform: str) -> None:
    """Assert that a node gives the numbers of the unrolled computation under every transformation."""
    by_node, unrolled, at = NODES[node]
    wrap = (lambda f: f) if transform.startswith("eager") else jax.jit
    got, expected = (wrap(partial(TRANSFORMS[transform], f))(at) for f in (by_node, unrolled))
    assert max_error(got, expected) < 2e-13


@pytest.mark.parametrize("node", NODES)
def test_define_by_run(node: str) -> None:
    """Assert that values, gradients and Hessian products are the same under `disable_jit`."""
    by_node, unrolled, at = NODES[node]
    with jax.disable_jit():
        got = by_node(at), jax.grad(scalar(by_node))(at)
    assert max_error(got, (unrolled(at), jax.grad(scalar(unrolled))(at))) < 2e-13
