"""Estimator for Lightning: there is none. The import says what to do instead."""

raise ImportError(
    "horovod.spark.lightning: there is no estimator for Lightning: the interface that Horovod's was made for is gone; "
    "call Lightning's own Trainer in a function, and that by reigen.spark.run, or train the model with TorchEstimator"
)
