"""Prompts from files: rows, chat template, filters, Grain loader, samplers."""
