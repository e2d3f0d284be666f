"""Views of an elastic job."""
