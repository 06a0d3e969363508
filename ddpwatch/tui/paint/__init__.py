"""Pure paint functions: a model, a width and a height in, rows of ``(text, style name)`` out. No app, no clock."""
