"""A script as Horovod's users write it, with nothing of Reigen's; it counts until a file says that it is enough."""

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch


@hvd.elastic.run
def train(state):
    while True:
        state.batch += int(hvd.allreduce(torch.tensor([1.0]), name="one").item())
        over = hvd.allreduce(torch.tensor([float(Path(sys.argv[1]).exists())]), name="over", op=hvd.Max)
        print(f"BATCH {state.batch} {hvd.rank()} {hvd.size()} {os.getpid()}", flush=True)
        if Path(f"{sys.argv[1]}.fail.{os.getpid()}").exists():
            raise ValueError("this process was to fail")
        if over.item():
            return
        time.sleep(0.02)
        state.commit()


hvd.init()
train(hvd.elastic.TorchState(model=torch.nn.Linear(2, 2), batch=0))
print("DONE", hvd.size(), flush=True)
