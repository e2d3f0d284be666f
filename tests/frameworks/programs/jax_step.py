"""Two steps of a linear model with reigen.jax; prints a digest of the weights."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import reigen.jax as rj

rj.init()
weights = rj.broadcast_parameters({"w": jnp.full((3, 2), float(rj.rank()))}, root_rank=1)
inputs = jnp.asarray(np.random.default_rng(rj.rank()).normal(size=(8, 3)), jnp.float32)
optimizer = rj.distributed(optax.adamw(0.1))
state = optimizer.init(weights)


@jax.jit
def step(weights, state):
    gradients = jax.grad(lambda w: jnp.mean((inputs @ w["w"]) ** 2))(weights)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state


for _ in range(2):
    weights, state = step(weights, state)
assert float(rj.allreduce(jnp.float32(rj.rank()), op=rj.Sum)) == 1.0
print("digest", hashlib.sha256(np.asarray(weights["w"]).tobytes()).hexdigest())
