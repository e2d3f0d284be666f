"""Placeholder: a front end for TensorFlow does not exist yet."""

raise ImportError("horovod.tensorflow: Reigen has no front end for TensorFlow yet; horovod.torch is there")
