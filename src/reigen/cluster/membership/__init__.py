"""Membership of a job's ranks: control service, liveness, failure detection, rendezvous."""
