"""Name of a module of Horovod's: Reigen has no jobs of tf.data services."""

raise ImportError("horovod.tensorflow.data: Reigen has no jobs of tf.data services yet")
