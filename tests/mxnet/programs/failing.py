"""Worker 1 dies in the middle of a step; the other one is told where it reads the result, and by the next call."""

import os

import mxnet as mx

kv = mx.kv.create("dist_sync")
ones, out = mx.nd.ones((3,)), mx.nd.zeros((3,))
kv.init("a", ones)
kv.pushpull("a", ones, out=out)
out.wait_to_read()
if kv.rank == 1:
    os._exit(9)
kv.pushpull("a", ones, out=out)
for what in ((out * 2).asnumpy, lambda: kv.push("a", ones)):
    try:
        what()
    except mx.base.MXNetError as error:
        print(type(error).__name__, error)
