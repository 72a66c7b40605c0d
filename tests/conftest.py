"""Settings of all tests: float64, two virtual devices, one compilation cache for the session."""

import os

# Compilation is what the tests cost: LLVM's expensive passes are left out (the notebooks and benchmarks keep them).
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

jax.config.update("jax_enable_x64", True)
