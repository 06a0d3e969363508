"""What devices and hosts did meanwhile."""
