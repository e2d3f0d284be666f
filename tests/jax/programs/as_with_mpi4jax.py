"""A program as people write them with mpi4jax: collectives within jit, their gradients, training; Reigen's names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import reigen.jax as rj

rj.init()
rank, size = rj.rank(), rj.size()
total = size * (size + 1) / 2


@jax.jit
def everything(x):
    summed = rj.allreduce(x, op=rj.Sum, name="summed")
    moved = rj.broadcast(x, 0, name="moved")
    gathered = rj.allgather(x, name="gathered")
    exchanged = rj.alltoall(jnp.full((size, 2), x[0]), name="exchanged")
    return summed, moved, gathered, exchanged


# -- each collective, in a compiled program
summed, moved, gathered, exchanged = everything(jnp.full((3,), rank + 1.0))
assert summed.tolist() == [total] * 3
assert moved.tolist() == [1.0] * 3
assert gathered.tolist() == [r + 1.0 for r in range(size) for _ in range(3)]
assert exchanged.tolist() == [[r + 1.0] * 2 for r in range(size)]


# -- gradients: of a sum over ranks, whose cotangent is summed as well
def loss(x):
    return jnp.sum(rj.allreduce(x, op=rj.Sum, name="in_the_loss") ** 2)


for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
    assert np.allclose(gradient(jnp.ones(3)), 2 * size * size), gradient(jnp.ones(3))


# -- in a loop of the program
@jax.jit
def power_iteration(x):
    def step(_, x):
        return rj.allreduce(x, op=rj.Average, name="in_a_loop") * 2

    return jax.lax.fori_loop(0, 5, step, x)


assert np.allclose(power_iteration(jnp.full((2,), rank + 1.0)), (size + 1) / 2 * 32)

# -- pytrees, half precision
tree = {"a": jnp.ones(2), "b": [jnp.ones((2, 2), jnp.bfloat16), jnp.arange(3)]}
for reduce in (lambda t: rj.allreduce(t, op=rj.Sum, name="tree"), jax.jit(lambda t: rj.allreduce(t, op=rj.Sum))):
    result = reduce(tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32) * size)

# -- training
images, labels = load_digits(return_X_y=True)
images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
keys = jax.random.split(jax.random.key(rank), 2)  # different on purpose: the broadcast makes them equal
params = {
    "hidden": jax.random.normal(keys[0], (64, 32)) * 0.1,
    "logits": jax.random.normal(keys[1], (32, 10)) * 0.1,
}
params = rj.broadcast_parameters(params, root_rank=0)
opt = rj.distributed(optax.adam(0.005))
state = opt.init(params)


@jax.jit
def train_step(params, state, x, y):
    def cross_entropy(params):
        logits = jax.nn.relu(x @ params["hidden"]) @ params["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = jax.value_and_grad(cross_entropy)(params)
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


share = np.arange(1440 // size * size)[rank::size]
for epoch in range(4):
    for batch in np.array_split(np.random.RandomState(epoch).permutation(share), len(share) // 32):
        params, state, value = train_step(params, state, images[batch], labels[batch])
found = jnp.argmax(jax.nn.relu(images[1440:] @ params["hidden"]) @ params["logits"], 1)
accuracy = float(np.mean(np.asarray(found) == labels[1440:]))
everyones = rj.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)])
print(f"done rank={rank} same={all(p == everyones[0] for p in everyones)} learned={accuracy > 0.8}", flush=True)
