"""Presentation of results: tables, plots, pages and coloured text."""
