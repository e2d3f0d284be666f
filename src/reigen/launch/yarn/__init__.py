"""Launcher on YARN: submits an application, whose master starts an agent in each of its containers."""
