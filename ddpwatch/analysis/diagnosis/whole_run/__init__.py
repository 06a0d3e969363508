"""What slows all ranks: pauses, slow input, slow links, slow devices, drift."""
