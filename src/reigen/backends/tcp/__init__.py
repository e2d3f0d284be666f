"""Backend over TCP: a connection between any two ranks that exchange data."""
