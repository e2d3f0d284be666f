"""Bootstrap of a rank: from its environment to the control service of its job."""
