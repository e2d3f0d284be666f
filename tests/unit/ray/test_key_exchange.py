"""Secrets that pass Ray's RPC."""

from __future__ import annotations

import random
import secrets

import pytest

from reigen.errors import AuthenticationError
from reigen.ray.key_exchange import PRIME, KeyPair


def floor_pi(bits: int) -> int:
    """floor(2^bits pi), by Machin's formula in integers."""
    guard = 64

    def arctan_of_inverse(number: int) -> int:
        term = (1 << (bits + guard)) // number
        total, divisor = term, 1
        while term:
            term //= -number * number
            divisor += 2
            total += term // divisor
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) >> guard


def is_prime(number: int) -> bool:
    """Miller and Rabin's test."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in random.Random(0).sample(range(2, 1 << 32), 8):
        power = pow(base, odd, number)
        if power in {1, number - 1}:
            continue
        if not any((power := power * power % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_group_is_number_14_of_rfc_3526():
    assert 2**2048 - 2**1984 - 1 + 2**64 * (floor_pi(1918) + 124476) == PRIME
    assert is_prime(PRIME)
    assert is_prime((PRIME - 1) // 2)


def test_the_other_side_lifts_the_mask_and_nobody_else_does():
    secret, here, there, third = secrets.token_bytes(32), KeyPair(), KeyPair(), KeyPair()
    masked = here.mask(secret, there.public)
    assert there.mask(masked, here.public) == secret != masked
    assert third.mask(masked, here.public) != secret
    assert third.mask(masked, there.public) != secret


@pytest.mark.parametrize("public", [-1, 0, 1, PRIME - 1, PRIME, PRIME + 1])
def test_keys_that_would_give_the_number_away_are_refused(public: int):
    with pytest.raises(AuthenticationError):
        KeyPair().mask(bytes(32), public)
