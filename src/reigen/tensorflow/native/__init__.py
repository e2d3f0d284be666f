"""Operations of our own in TensorFlow, asynchronous and without a copy, by its C API: nothing is compiled."""
