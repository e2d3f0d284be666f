"""Autotuning: parameters of a running job that change its speed and not its results, chosen by measuring its steps."""
