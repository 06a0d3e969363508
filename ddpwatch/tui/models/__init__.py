"""What the views draw, as frozen data built from the run's state. Knows no widget and no colour."""
