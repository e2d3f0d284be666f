"""Place of a process in an elastic job, as its launcher gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from reigen.cluster.environ import (
    CANDIDATE_VARIABLE,
    ELASTIC_TIMEOUT_VARIABLE,
    ELASTIC_VARIABLE,
    INCARNATION_VARIABLE,
    MAX_SIZE_VARIABLE,
    MIN_SIZE_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SECRET_VARIABLE,
    SLOT_VARIABLE,
    STRAGGLER_VARIABLE,
    VOTER_FD_VARIABLE,
    WARM_SPARES_VARIABLE,
    WITNESS_VARIABLE,
    parse_secret,
)
from reigen.cluster.launcher_detection import JobInfo, VariableReader
from reigen.cluster.membership.stragglers import DEFAULT_STRAGGLER_RULE, StragglerRule
from reigen.cluster.membership.views.record import MemberId

#: Where the launcher names no bound.
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ElasticPlace:
    """Place of a process in an elastic job.

    Attributes:
        member: its slot, and how often the launcher had started that before.
        is_candidate: it was started later than the first members.
        min_size, max_size: numbers of ranks between which steps are run.
        timeout_seconds: how long fewer members wait for more.
        voter_fd: descriptor of the memory of this host's voter.
        witness: as of `reigen.cluster.membership.elastic.witness.make_witness`; empty: there is none.
        stragglers: who is one.
        num_spares: how many of ``max_size`` are warm spares.
    """

    member: MemberId
    is_candidate: bool
    min_size: int
    max_size: int
    timeout_seconds: float
    voter_fd: int
    witness: str = ""
    stragglers: StragglerRule = DEFAULT_STRAGGLER_RULE
    num_spares: int = 0

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Self | None:
        """Read the place; None in a job that is not elastic.

        Raises:
            ConfigError: the variables are incomplete; all problems are listed.
        """
        if environ.get(ELASTIC_VARIABLE) != "1":
            return None
        reader = VariableReader(environ, "the launcher of an elastic job")
        names = (SLOT_VARIABLE, INCARNATION_VARIABLE, MIN_SIZE_VARIABLE, VOTER_FD_VARIABLE)
        slot, incarnation, min_size, voter_fd = (reader.number(name) for name in names)
        max_size = reader.optional(MAX_SIZE_VARIABLE) or _MOST_RANKS
        num_spares = reader.optional(WARM_SPARES_VARIABLE) or 0
        timeout = _read_seconds(reader, ELASTIC_TIMEOUT_VARIABLE)
        reader.check("the variables of an elastic job are not in order", "; start it with `reigen run --min-np N ...`.")
        is_candidate = environ.get(CANDIDATE_VARIABLE) == "1"
        witness = environ.get(WITNESS_VARIABLE, "")
        text = environ.get(STRAGGLER_VARIABLE, "")
        rule = StragglerRule.parse(text, STRAGGLER_VARIABLE) if text else DEFAULT_STRAGGLER_RULE
        member, sizes = MemberId(slot, incarnation), (min_size, max_size)
        return cls(member, is_candidate, *sizes, timeout, voter_fd, witness, rule, num_spares)

    def candidate_job(self, environ: Mapping[str, str]) -> JobInfo | None:
        """Describe the job to a process that has no rank yet; None for one that has.

        Raises:
            ConfigError: the variables are incomplete; all problems are listed.
        """
        if not self.is_candidate:
            return None
        reader = VariableReader(environ, "the launcher of an elastic job")
        rendezvous, secret = reader.text(RENDEZVOUS_VARIABLE), parse_secret(reader.text(SECRET_VARIABLE))
        reader.check("the variables of an elastic job are not in order", "; start it with `reigen run --min-np N ...`.")
        slot = self.member.slot
        return JobInfo(
            slot, max(slot + 1, self.max_size), rendezvous, secret, "reigen run", f"{CANDIDATE_VARIABLE} is set"
        )


def _read_seconds(reader: VariableReader, name: str) -> float:
    """Read a variable that must be there and be a number of seconds."""
    text = reader.text(name)
    try:
        return float(text or 0)
    except ValueError:
        reader.problems.append(f"{name} is {text!r}, not a number of seconds")
        return 0.0
