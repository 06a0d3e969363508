"""What is found, in sentences."""
