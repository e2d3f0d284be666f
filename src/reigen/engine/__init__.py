"""Negotiation, response cache, fusion, handles, and the loop that drives them."""
