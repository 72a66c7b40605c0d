"""Settings of all tests: float64, two virtual devices, one compilation cache for the session."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("MPLBACKEND", "Agg")

import jax  # noqa: E402 (the flags are read at import)

jax.config.update("jax_enable_x64", True)
