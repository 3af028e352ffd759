"""Model calls of any harness to any engine, captured on the way: exact, durable, attributed."""
