"""A program for stand-in machines: joins its job twice, prints rank, size, number of hosts and a sum of all ranks."""

from __future__ import annotations

import json
import os

import numpy as np

import reigen

for _ in range(2):
    reigen.init()
    total = reigen.allreduce(np.full(1000, float(reigen.rank() + 1)), op=reigen.Sum)
    assert (total == total[0]).all()
    line = json.dumps([reigen.rank(), reigen.size(), reigen.cross_size(), total[0]])
    os.write(1, (line + "\n").encode())  # one write: ranks may share a pipe
    reigen.barrier()
    reigen.shutdown()
