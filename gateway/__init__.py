"""The trunk: HTTP, shared queue, telemetry, command line and wiring; the only importer of policies and backends."""

__version__ = "0.1.0"
