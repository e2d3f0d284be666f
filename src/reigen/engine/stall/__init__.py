"""Stalls: collectives that wait long for ranks, and what is reported."""
