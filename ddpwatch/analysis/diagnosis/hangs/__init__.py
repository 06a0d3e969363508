"""Who holds up the others when ranks stand still, and who has died."""
