"""Key exchange (Diffie and Hellman) for secrets that pass Ray's RPC, which is plain text.

Keys are fresh for each secret and worker. Who only listens learns nothing. Who can alter what passes could put keys of
its own in between; but on a cluster without Ray's TLS such a one can run any code in any worker, and needs no secret of
ours. The group is number 14 of RFC 3526.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from reigen.errors import AuthenticationError

#: Safe prime of 2048 bits: 2^2048 - 2^1984 - 1 + 2^64 (floor(2^1918 pi) + 124476); 2 generates its large subgroup.
PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_GENERATOR = 2
_EXPONENT_BITS = 512
_LABEL = b"reigen-ray-secret"


class KeyPair:
    """Key pair of one side, for one secret; the other side gets ``public``."""

    def __init__(self) -> None:
        self._private = secrets.randbits(_EXPONENT_BITS) | 1 << (_EXPONENT_BITS - 1)
        self.public = pow(_GENERATOR, self._private, PRIME)

    def mask(self, secret: bytes, other: int) -> bytes:
        """Mask 32 bytes for the holder of the ``other`` public key, or lift the mask: it is its own inverse.

        Raises:
            AuthenticationError: the other key is one that would give the common number away.
        """
        if not 2 <= other <= PRIME - 2:
            raise AuthenticationError("the public key of the other side is none")
        size = (PRIME.bit_length() + 7) // 8
        low, high = sorted([self.public, other])
        common = pow(other, self._private, PRIME).to_bytes(size, "big")
        message = _LABEL + low.to_bytes(size, "big") + high.to_bytes(size, "big")
        stream = hmac.digest(common, message, hashlib.sha256)
        return bytes(one ^ two for one, two in zip(secret, stream, strict=True))
