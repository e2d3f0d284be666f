"""What all workers must say alike before it holds: what a key is, which optimizer a store has. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from reigen.errors import CollectiveError, MismatchError

_Word = TypeVar("_Word", bound=Hashable)


@dataclass
class Consensus(Generic[_Word]):
    """One thing that workers say, gathered until all have.

    Attributes:
        what: is agreed on, for errors.
        describe: a worker's word, for errors.
        words: of the workers that have spoken since the last decision.
    """

    what: str
    describe: Callable[[_Word], str] = str
    words: dict[int, _Word] = field(default_factory=dict)

    def say(self, worker: int, word: _Word) -> None:
        """A worker's word; it may be said again."""
        self.words[worker] = word

    def missing(self, expected: Collection[int]) -> tuple[int, ...]:
        """Those of ``expected`` that have not spoken, ascending."""
        return tuple(sorted(set(expected) - set(self.words)))

    def decide(self, expected: Collection[int]) -> tuple[_Word | None, CollectiveError | None]:
        """The word that all have said, or the error that all get, or neither while somebody is missing.

        After an error all words are forgotten, so that the workers can try again.
        """
        if not self.words or self.missing(expected):
            return None, None
        first = self.words[min(self.words)]
        if all(word == first for word in self.words.values()):
            return first, None
        error = MismatchError(
            f"the workers do not agree on {self.what}", ranks=self._odd_ones(), details=self.details(self.words)
        )
        self.words.clear()
        return None, error

    def details(self, words: Mapping[int, _Word]) -> dict[int, str]:
        """What each worker said, for errors."""
        return {worker: self.describe(word) for worker, word in words.items()}

    def _odd_ones(self) -> list[int]:
        """The workers that said something else than most; than the lowest, where there is no majority."""
        said: dict[_Word, int] = {}
        for worker in sorted(self.words):
            said[self.words[worker]] = said.get(self.words[worker], 0) + 1
        usual = max(said, key=lambda word: said[word])
        return [worker for worker, word in self.words.items() if word != usual]
