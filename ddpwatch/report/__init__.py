"""Figures in, words out: the report as text, Markdown, HTML and charts."""
