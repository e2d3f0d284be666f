"""Launcher's side of elastic jobs, whose processes come and go: `job` decides, `supervision` carries it out."""
