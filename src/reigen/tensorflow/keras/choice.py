"""The Keras behind ``tf.keras`` in this process: TensorFlow reads TF_USE_LEGACY_KERAS when it is imported."""

import tensorflow as tf

#: Keras 2 in the package tf_keras, as against Keras 3
IS_LEGACY: bool = tf.keras.Model.__module__.startswith("tf_keras.")
