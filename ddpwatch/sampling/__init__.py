"""Which steps are recorded in full, as shadows, or not at all; and what watching costs. See docs/sampling.md."""
