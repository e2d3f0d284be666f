"""MXNet's closed forms of dist_sync, on every worker, through the engine and without waiting in between."""

import mxnet as mx
import numpy as np

SMALL, LARGE = (3, 4), (60, 70)  # a large key lies on all servers: the test sets the bound
kv = mx.kv.create("dist_sync")
n, rank = kv.num_workers, kv.rank
assert kv.type == "dist_sync"
assert isinstance(kv, mx.kvstore.KVStore)
assert "reigen" in type(kv).__module__


def check(array, expected):
    assert (array.asnumpy() == expected).all(), (array, expected)


for dtype in ("float32", "float16", "float64", "int32", "int8", "uint8", "int64"):
    for shape in (SMALL, LARGE):
        key = f"{dtype} {shape}"
        kv.init(key, mx.nd.full(shape, 5 + rank, dtype=dtype))
        out = mx.nd.zeros(shape, dtype=dtype)
        kv.pull(key, out=out)
        check(out, 5)  # worker 0's
        seen = []
        for i in range(4):  # without an optimizer a round's sum takes the place of what was there
            kv.push(key, mx.nd.full(shape, rank + i, dtype=dtype))
            kv.pull(key, out=out)
            seen.append(out.copy())
        for i, each in enumerate(seen):
            check(each, sum(worker + i for worker in range(n)))
        kv.pushpull(key, out)  # in place
        check(out, n * sum(worker + 3 for worker in range(n)))

# two devices, and several keys at once; what is pushed is not computed yet, and what was pulled is needed at once
devices = [mx.cpu(0), mx.cpu(1)]
keys = ["a", "b", "c"]
kv.init(keys, [mx.nd.zeros(LARGE)] * 3)
weights = [[mx.nd.zeros(LARGE, ctx=each) for each in devices] for _ in keys]
for i in range(3):
    gradients = []
    for _ in keys:
        big = mx.nd.ones((300, 300))
        factor = mx.nd.dot(big, big).sum() / 300**3 * (rank + 1 + i)
        gradients.append([mx.nd.ones(LARGE, ctx=each) * factor.as_in_context(each) for each in devices])
    kv.push(keys, gradients, priority=-i)
    kv.pull(keys, out=weights, priority=-i)
    total = sum(2 * (worker + 1 + i) for worker in range(n))
    later = [[each * 2 for each in several] for several in weights]
    for several in later:
        for each in several:
            np.testing.assert_allclose(each.asnumpy(), 2 * total, rtol=1e-5)

# a weight that oneDNN has brought into a layout of its own, as predicting does
images, weight = mx.nd.ones((1, 8, 8, 8)), mx.nd.ones((16, 8, 3, 3))
kv.init("filter", mx.nd.zeros(weight.shape))
mx.nd.Convolution(images, weight, mx.nd.zeros(16), kernel=(3, 3), num_filter=16).wait_to_read()
kv.pushpull("filter", mx.nd.ones(weight.shape) * mx.nd.arange(3), out=weight)
check(weight, n * np.broadcast_to(np.arange(3), weight.shape))

# rows
shape = (10, 2)
rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)) * (rank + 1), [0, 1 + rank]), shape=shape)
kv.init("rows", mx.nd.ones(shape).tostype("row_sparse"))
kv.push("rows", rows)
got = mx.nd.sparse.zeros("row_sparse", shape)
kv.row_sparse_pull("rows", out=got, row_ids=mx.nd.array([2, 0, 0, 9], dtype="int64"))
expected = np.zeros(shape)
expected[0], expected[2] = n * (n + 1) / 2, 2
check(got.tostype("default"), expected)

# with an optimizer on the servers, which is told another rate as scripts do: by giving it again
kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0, multi_precision=True))
for dtype in ("float32", "float16"):
    kv.init(dtype, mx.nd.ones(LARGE, dtype=dtype))
for i in range(4):
    for dtype in ("float32", "float16"):
        out = mx.nd.zeros(LARGE, dtype=dtype)
        kv.push(dtype, mx.nd.full(LARGE, rank + 1, dtype=dtype))
        kv.pull(dtype, out=out)
        step = n * (n + 1) / 2
        check(out, 1 - step * (i + 1) if i < 2 else 1 - 2 * step - 0.5 * step * (i - 1))
    if i == 1:
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, wd=0.0, multi_precision=True))

# with compression, whose numbers may be texts
kv2 = mx.kv.create("dist_sync")
kv2.set_gradient_compression({"type": "2bit", "threshold": "0.25"})
kv2.init("codes", mx.nd.zeros(LARGE))
out = mx.nd.zeros(LARGE)
for i in range(3):  # 0.1 a round is not sent until three of them are 0.3
    kv2.pushpull("codes", mx.nd.full(LARGE, 0.1), out=out)
    check(out, 0.25 * n if i == 2 else 0)

for wrong in (
    lambda: kv.pull("unknown", out=mx.nd.ones((1,))),
    lambda: kv.push("float32", mx.nd.ones((1,))),
    lambda: kv.init("float32", mx.nd.ones(LARGE)),
    lambda: kv.init(7, mx.nd.ones(LARGE)),
    lambda: kv.pull("float32", out=mx.nd.ones(LARGE).tostype("row_sparse"), ignore_sparse=False),
    lambda: mx.kv.create("dist_snyc"),
    lambda: kv2.set_gradient_compression("2bit"),
):
    try:
        wrong()
    except mx.base.MXNetError:
        continue
    raise AssertionError("that is no error")

kv._barrier()
print("closed forms hold", rank, n)
