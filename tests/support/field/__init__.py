"""Jobs that people reported as slow, hanging or healthy, rebuilt small, each with its truth."""
