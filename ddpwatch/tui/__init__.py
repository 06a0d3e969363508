"""The dashboard. The only package that imports textual. Widgets draw, `paint` decides what, `models` hold it."""
