"""What is found in a run's steps besides late ranks: each rule in a file of its own."""
