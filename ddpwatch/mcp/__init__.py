"""`ddpwatch mcp`: answers an agent's questions about live runs and recordings."""
