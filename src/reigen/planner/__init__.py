"""Planner: predicts how fast a training job runs on a described cluster. Pure, and without any framework.

Files that go in (lengths of time in seconds, sizes in bytes, rates in bytes a second, unless a unit stands in a text
such as ``"25 Gbit/s"``, ``"50 us"``; see `reigen.planner.units`):

**Training profile**, ``train.json`` (`reigen.planner.profile.TrainingProfile`)::

    {"version": 1, "name": "resnet50", "source": "where the figures come from",
     "batch": 64,                    samples of one rank in one step
     "samples_per_epoch": 1281167,   0: not known (then there is no cost of an epoch)
     "forward_seconds": 0.06, "backward_seconds": 0.12,   of one rank, alone, with nothing to reduce
     "update_seconds": 0.004,        the optimizer's, for all parameters, on one rank
     "other_seconds": 0.0,           rest of a step: data, bookkeeping
     "processors": 1.0,              processors of the host that are busy meanwhile: 0 for a GPU (or a sleep)
     "steps": 50,                    measured steps whose medians these are; 0 is an error; null: not measured
     "tensors": [                    in the order of model.parameters()
       {"name": "conv1.weight", "elements": 9408, "dtype": "float32",
        "ready_seconds": 0.118}]}    when its gradient is there, after the start of backward; null: see below

Where ``ready_seconds`` is null (or left out), gradients are taken to be ready in reverse order, at times in proportion
to the elements behind them. ``processors`` and everything above it but version, batch and the three lengths of time may
be left out.

**Cluster**, ``cluster.yaml`` (`reigen.planner.cluster.Cluster`)::

    currency: USD                    (optional) and ``prices_of``: where prices come from, and their date
    hosts:                           kinds of hosts, in the order of ranks
      - {name: gpu, count: 8, ranks: 8, processors: 64, bandwidth: 25 Gbit/s, latency: 25 us, price_per_hour: 24.48}
      - {name: ps,  count: 4, ranks: 0, servers: 2, processors: 16, bandwidth: 10 Gbit/s, price_per_hour: 1.2}
    network:                         (optional)
      oversubscription: 2            all hosts' links together, divided by what the network carries between racks
      hosts_per_rack: 16             (default: all hosts are in one rack, whose switch carries everything)
      loss: 0
    shared_processors: 2             (optional) all hosts are stand-ins on one machine with so many processors
    stragglers:
      - {rank: 5, slowdown: 1.5}     its computing takes so many times as long; or {host: gpu-3, slowdown: ...}
    failures:
      - {host: gpu-2}                the host is lost; the job goes on without it

``device_bandwidth`` of a kind of hosts: ranks are GPUs that exchange at this rate among themselves (NVLink, PCIe), each
direction; without it ranks share the host's memory. Hosts are named NAME-0, NAME-1 ... where ``count`` is above 1.
``servers``: how many servers may be placed there; without any such host servers share the hosts of the ranks.

**Calibration** (`reigen.planner.costs.Costs`): what `reigen bench` writes, names and values of `Costs`' fields; those
that are left out keep their defaults::

    {"version": 1, "machine": "...", "date": "...", "costs": {"tcp_seconds_per_byte": 2.1e-10}}

Out comes a `reigen.planner.prediction.Prediction`, made by
`reigen.planner.simulator.simulate(profile, cluster, strategy, costs)`.
"""
