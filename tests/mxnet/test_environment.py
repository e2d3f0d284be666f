"""What the other tests of this directory stand on."""

import numpy as np


def test_this_is_the_mxnet_and_the_numpy_that_are_spoken_of(mx):
    assert mx.__version__ == "1.9.1"
    assert np.__version__ == "1.23.5"
