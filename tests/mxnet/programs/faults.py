"""What goes wrong in scripts for MXNet's KVStore: `faults.py MODE`."""

import os
import signal
import sys

import mxnet as mx

mode = sys.argv[1]
kv = mx.kv.create("dist_sync")
if mode == "profile servers":
    mx.profiler.set_kvstore_handle(kv.handle)
    mx.profiler.set_config(profile_all=True, filename=sys.argv[2], profile_process="server")
    mx.profiler.set_state("run", "server")
    mx.profiler.set_config(profile_all=True, filename=sys.argv[2])
    mx.profiler.set_state("run")
ones, out = mx.nd.ones((3,)), mx.nd.zeros((3,))
kv.init(["x0", "x1"], [ones, ones])
kv.pushpull("x0", ones, out=out)
out.wait_to_read()
if mode == "profile servers":
    mx.profiler.dump(profile_process="server")
    mx.profiler.dump()
if mode == "raise amid pushes":
    for _ in range(50):
        kv.push("x0", ones)
    raise RuntimeError("a mistake of the script")
if mode == "all raise":
    raise RuntimeError("a mistake of the script")
if mode == "one stops":
    if kv.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    kv.pushpull("x0", ones, out=out)
    out.wait_to_read()
if mode == "others push":
    kv.push(f"x{kv.rank}", ones)
    sys.exit(5)
if mode == "others pushpull":
    kv.pushpull(f"x{kv.rank}", ones, out=out)
    sys.exit(5)
if mode == "others init":
    kv.init(f"y{kv.rank}", ones)
