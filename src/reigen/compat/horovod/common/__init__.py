"""Names that do not depend on a framework."""
