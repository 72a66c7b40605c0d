"""Sparsity patterns, their colours, and nonzeros from a few products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from tapeless.adjoint import _sparse
from tapeless.adjoint._sparse import Pattern, as_pattern, detect_pattern, nonzeros, pattern_of_matrix

EDGES = np.array([(0, 3), (1, 4), (2, 0), (3, 5), (5, 1), (4, 2)])


def reaction(u: Any, k: Any = 0.7) -> Any:
    """Two fields on a 4 x 5 grid, coupled one way, with a one-sided stencil."""
    a, b = u["a"], u["b"]
    w = jnp.pad(a, 1)
    return {"a": a**3 - k * w[2:, 1:-1] + 2 * w[1:-1, :-2] - jnp.sin(b), "b": b * jnp.roll(b, 1, 0) - k}


def state(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.uniform(0.5, 2, (4, 5))) for name in "ab"}


def dense(f: Any, u: Any) -> np.ndarray:
    flat, unravel = ravel_pytree(u)
    return np.asarray(jax.jacfwd(lambda v: ravel_pytree(f(unravel(v)))[0])(flat))


def test_pattern_is_that_of_the_dense_jacobian() -> None:
    """Assert that nonzeros stand where the dense Jacobian has them, and have its values, transposed as well."""
    u = state()
    J, pattern = dense(reaction, u), detect_pattern(reaction, u)
    assert pattern == Pattern(*np.nonzero(J), J.shape[0])
    _, matvec = jax.linearize(reaction, u)
    values = nonzeros(matvec, pattern, u)
    np.testing.assert_allclose(pattern.matrix(np.asarray(values)).toarray(), J, rtol=1e-14, atol=1e-14)
    assert not pattern.symmetric
    transpose = jax.linear_transpose(matvec, u)
    back = nonzeros(lambda v: transpose(v)[0], pattern.transposed, u)
    np.testing.assert_allclose(pattern.transposed.matrix(np.asarray(back)).toarray(), J.T, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(back[pattern.from_transposed], values, rtol=1e-14)


def test_columns_of_a_colour_share_no_row() -> None:
    """Assert a proper colouring, with the seven colours that a five-point stencil takes at best in this order."""
    n = 12
    line = scipy.sparse.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(n, n))
    eye = scipy.sparse.eye_array(n)
    pattern = as_pattern(scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line))
    assert pattern is not None
    assert pattern.symmetric
    taken = set(zip(pattern.rows.tolist(), pattern.colours[pattern.cols].tolist(), strict=True))
    assert len(taken) == pattern.count == 5 * n * n - 4 * n
    assert pattern.colours.max() + 1 <= 7


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, lambda f: lambda k: jax.vmap(f)(k[None]), jax.jacfwd])
def test_found_while_tracing_whatever_the_numbers(wrap: Any) -> None:
    """Assert that a pattern is found under every transformation, and that a factor that is zero does not thin it."""
    expected = Pattern(*np.nonzero(dense(reaction, state())), 40)
    seen = []

    def f(k: Any) -> Any:
        seen.append(detect_pattern(lambda u: reaction(u, k), state()))
        seen.append(detect_pattern(lambda u: reaction(u, jnp.zeros(()) + k), state()))
        return k

    wrap(f)(jnp.asarray(0.0))
    zero = jnp.asarray(0.0)
    seen.append(detect_pattern(lambda u: reaction(u, zero), state()))
    assert seen == [expected] * len(seen)


def test_found_once() -> None:
    """Assert that equal equations find the same pattern, and that other connectivity is another pattern."""

    def network(edges: Any) -> Any:
        return lambda u: u.at[edges[:, 0]].add(u[edges[:, 1]] ** 2)

    u = jnp.linspace(1.0, 2.0, 6)
    first = detect_pattern(network(EDGES), u)
    assert detect_pattern(network(EDGES.copy()), u * 2) is first
    assert first == Pattern(*np.nonzero(dense(network(EDGES), u)), 6)
    other = detect_pattern(network(EDGES[:, ::-1].copy()), u)
    assert other == Pattern(*np.nonzero(dense(network(EDGES[:, ::-1]), u)), 6) != first


def test_indices_are_followed_through_arithmetic_and_jit() -> None:
    """Assert exact patterns for indices computed from known integers, inside jit and with a traced factor."""
    edges = jnp.asarray(EDGES)

    @jax.jit
    def inner(e: Any, k: Any, u: Any) -> Any:
        return 3 * u + k * u[(e[:, 1] * 2 + 1) % 6] - u[jnp.flip(jnp.sort(e[:, 0]))]

    def f(u: Any, k: Any) -> Any:
        return inner(edges, k, u)

    u = jnp.linspace(1.0, 2.0, 6)
    found = []
    jax.jit(lambda k: found.append(detect_pattern(lambda u: f(u, k), u)))(0.3)
    assert found == [Pattern(*np.nonzero(dense(lambda u: f(u, 0.3), u)), 6)]


def test_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the values do not depend on how many products are found at the same time."""
    u = state(1)
    pattern = detect_pattern(reaction, u)
    _, matvec = jax.linearize(reaction, u)
    whole = nonzeros(matvec, pattern, u)
    monkeypatch.setattr(_sparse, "_AT_ONCE", 2 * 40)
    np.testing.assert_array_equal(nonzeros(matvec, pattern, u), whole)


def test_structures_that_users_give() -> None:
    """Assert that BCOO (padded and unsorted), SciPy's formats and dense arrays of one structure are equal."""
    A = np.array([[1.0, 0, 2], [0, 3, 0], [4, 0, 0]])
    expected = Pattern([0, 0, 1, 2], [0, 2, 1, 0], 3)
    padded = BCOO((jnp.ones(6), jnp.array([[2, 0], [0, 0], [0, 2], [1, 1], [3, 3], [0, 0]])), shape=(3, 3))
    for given in (A, scipy.sparse.csc_array(A), scipy.sparse.coo_matrix(A), BCOO.fromdense(jnp.asarray(A)), padded):
        assert as_pattern(given) == expected
        assert hash(as_pattern(given)) == hash(expected)
    assert pattern_of_matrix(jnp.asarray(A)) == expected
    assert as_pattern(expected) is expected
    assert as_pattern(None) is None
    jax.jit(lambda A: np.testing.assert_equal(pattern_of_matrix(A), None))(A)
    assert detect_pattern(lambda u: u, jnp.zeros(0)).count == 0
    assert nonzeros(lambda v: 0 * v, Pattern([], [], 3), jnp.ones(3)).shape == (0,)


def test_what_cannot_be_found_is_said() -> None:
    """Assert an error that names the next step for unknown operations, dense and rectangular Jacobians, wrong sizes."""
    u = jnp.ones(2000)
    with pytest.raises(ValueError, match=r"fft.*pattern="):
        detect_pattern(lambda u: jnp.fft.fft(u).real, u)
    with pytest.raises(ValueError, match=r"about 2000 of the 2000 entries.*pattern="):
        jax.jit(lambda i: detect_pattern(lambda u: u[i], u) and None)(jnp.arange(2000))
    with pytest.raises(ValueError, match="square, got 2000 unknowns"):
        detect_pattern(lambda u: u[1:], u)
    with pytest.raises(ValueError, match="Expected 2000 rows, got 3"):
        nonzeros(lambda v: v, Pattern([0], [0], 3), u)
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        as_pattern(np.ones((2, 3)))
    with pytest.raises(TypeError, match="got list"):
        as_pattern([[1]])
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda A: as_pattern(A) and None)(BCOO.fromdense(jnp.eye(2)))


def test_a_global_sum_is_dense_and_a_local_one_is_not() -> None:
    """Assert that the look at a few columns refuses a mean over all unknowns, and lets sums over cells pass."""
    u = jnp.ones(1200)
    with pytest.raises(ValueError, match="looks dense"):
        detect_pattern(lambda u: u - jnp.mean(u), u)
    local = detect_pattern(lambda u: u + jnp.repeat(jnp.sum(u.reshape(-1, 4), axis=1), 4), u)
    assert local.count == 4 * 1200
