"""Description of what must be the same on all members of a job: model, optimizer and data.

All tell a digest of it when they enter a view with newcomers, so that the lines themselves are sent only where some
newcomer's differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from reigen.api.functions import broadcast_object
from reigen.errors import ArgumentError

_DIGEST_BYTES = 16


def digest_description(description: Mapping[str, Sequence[str]]) -> bytes:
    """Return a digest of the lines that describe a training, by name."""
    lines = "\n".join(f"{name}\t{line}" for name in sorted(description) for line in description[name])
    return blake2b(lines.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def check_description(own: Mapping[str, Sequence[str]], source: int) -> None:
    """Collective: raise ArgumentError if this rank's lines are not those of the source; here alone."""
    others: dict[str, list[str]] = broadcast_object(own, source, "elastic.description")
    for name in sorted(own.keys() | others.keys()):
        own_lines, source_lines = own.get(name, []), others.get(name, [])
        if own_lines != source_lines:
            pairs = zip([*own_lines, "nothing more"], [*source_lines, "nothing more"], strict=False)
            line, other = next((pair for pair in pairs if pair[0] != pair[1]), ("nothing", "something"))
            raise ArgumentError(
                f"{name} of this rank is not like that of rank {source}, whose state it is to get: {line} here, "
                f"{other} there. Start this process with the same program and options as the others"
            )
