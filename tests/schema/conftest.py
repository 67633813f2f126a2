"""The fixtures of schema_cases, for every test of the schema."""

from schema_cases import check, faults, files, needed

__all__ = ["check", "faults", "files", "needed"]
