"""Typed configuration and the plain records that parts exchange. Imports nothing heavy."""
