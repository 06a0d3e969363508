"""What the views draw: frozen models, one module per view, built from the run's state. No widget, no colour."""
