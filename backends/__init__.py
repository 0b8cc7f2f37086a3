"""How an engine is spoken to. Knows no tenants, queues or HTTP server."""
