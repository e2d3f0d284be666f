"""Processes of a job on one host, and the process that supervises them all."""
