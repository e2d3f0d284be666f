"""There is no front end for TensorFlow yet."""

raise ImportError("horovod.tensorflow: Reigen has no front end for TensorFlow yet; horovod.torch is there")
