"""Products for models in JAX. The package itself imports no jax."""
