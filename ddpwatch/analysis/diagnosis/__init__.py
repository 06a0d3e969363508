"""What is wrong with a run: one sentence for the screen (verdict), a list for the report (findings)."""
