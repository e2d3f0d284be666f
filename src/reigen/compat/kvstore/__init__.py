"""A directory for PYTHONPATH, in which ``import mxnet`` finds MXNet with Reigen's stores (`reigen run --as-mxnet`)."""
