"""Stalls: collectives that wait long for ranks, and their reports."""
