"""tapeless: gradients of physics simulations, without the tape.

Subpackages: `tapeless.sim` (simulators), `tapeless.solvers` (linear and root solvers),
`tapeless.checkpointing` (loops whose gradient needs bounded memory), `tapeless.adjoint`
(the nodes that all of them are made of, and gradient checks).
"""

__version__ = "0.1.0"
