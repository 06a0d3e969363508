"""The dashboard. The only package that imports textual. Widgets draw, `paint` decides what, `model` holds it."""
