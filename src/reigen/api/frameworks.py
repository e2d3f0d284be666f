"""Table of the frameworks that have a package in Reigen. It imports none of them."""

from __future__ import annotations

#: By name (of the framework's module, of `reigen.NAME` and of Horovod's extension) the class of the adapter
#: in `reigen.NAME.adapter`.
FRAMEWORKS = {"torch": "TorchAdapter", "mxnet": "MXNetAdapter", "tensorflow": "TensorFlowAdapter", "jax": "JaxAdapter"}
